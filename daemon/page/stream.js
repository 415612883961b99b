// The stream of the daemon's status. Read with fetch(), since an EventSource cannot send a token.
//
// States: connecting, live, stale (connected, but nothing came for a while), gone (tries again), denied (asks for a token).

const URL = "/v1/live";
const TOKEN = "terracekv-token";
const STALE_MS = 5000;
const RETRY_MS = [500, 1000, 2000, 4000, 8000];

export const token = {
  get: () => sessionStorage.getItem(TOKEN),
  set: (value) => sessionStorage.setItem(TOKEN, value),
  forget: () => sessionStorage.removeItem(TOKEN),
};

// A header holds bytes: letters that are more than one go as UTF-8, where fetch() would throw as if nobody answered.
export function headers() {
  const secret = token.get();
  return secret ? { Authorization: `Bearer ${String.fromCharCode(...new TextEncoder().encode(secret))}` } : {};
}

export class Stream {
  // heard(name, document) for each event; changed(state, facts) for each change of the link.
  constructor(heard, changed) {
    this.heard = heard;
    this.changed = changed;
    this.failures = 0;
    this.lastAt = 0;
    this.state = null;
    this.timer = null;
    this.abort = null;
    setInterval(() => this.look(), 500);
    document.addEventListener("visibilitychange", () => {
      if (!document.hidden && this.state === "gone") this.start();
    });
  }

  start() {
    clearTimeout(this.timer);
    this.abort?.abort();
    this.abort = new AbortController();
    this.run(this.abort);
  }

  tell(state, facts = {}) {
    this.state = state;
    this.changed(state, facts);
  }

  look() {
    const silent = Date.now() - this.lastAt;
    if ((this.state === "live" || this.state === "stale") && silent > STALE_MS) this.tell("stale", { silent });
  }

  async run(abort) {
    if (this.state !== "gone") this.tell("connecting");
    try {
      const answer = await fetch(URL, { headers: headers(), cache: "no-store", signal: abort.signal });
      if (answer.status === 401 || answer.status === 403) {
        const { error } = await answer.json();
        return this.tell("denied", { message: error.message, wrong: token.get() !== null });
      }
      if (!answer.ok) {
        const { error } = await answer.json();
        throw Object.assign(new Error(`${error.message}: ${error.hint}`), { refused: true });
      }
      await this.read(answer.body.getReader(), abort);
      throw new Error("the daemon ended the stream");
    } catch (error) {
      if (!abort.signal.aborted) this.lost(error);
    }
  }

  async read(reader, abort) {
    const decoder = new TextDecoder();
    let text = "";
    for (;;) {
      const { done, value } = await reader.read();
      if (done || abort.signal.aborted) return;
      text += decoder.decode(value, { stream: true });
      const events = text.split("\n\n");
      text = events.pop();
      for (const event of events) this.take(event);
    }
  }

  take(text) {
    const fields = Object.fromEntries(text.split("\n").map((line) => line.split(/: (.*)/s, 2)));
    this.lastAt = Date.now();
    this.failures = 0;
    this.heard(fields.event, JSON.parse(fields.data));
    if (this.state !== "live") this.tell("live");
  }

  lost(error) {
    const wait = RETRY_MS[Math.min(this.failures, RETRY_MS.length - 1)];
    this.failures += 1;
    const seconds = this.lastAt ? (Date.now() - this.lastAt) / 1000 : null;
    const message = error instanceof TypeError ? "no daemon answers" : error.message;
    this.tell("gone", { message, wait, seconds, refused: Boolean(error.refused) });
    this.timer = setTimeout(() => this.start(), wait);
  }
}
