// Numbers and reasons in words, and the one way in which elements are made: text is text, never markup.

export const TIERS = ["gpu", "host", "disk", "s3"];

export const REASONS = {
  shorter_than_block: ["shorter than a block", "The prompt has no full block, so nothing of it is ever stored. A smaller block_tokens of the engine's connector would keep shorter prompts."],
  unknown_namespace: ["unknown namespace", "No engine of that model, revision, dtype, layout and tenant was here. Compare what was asked for with the namespaces below."],
  absent: ["absent", "Nobody has stored this block, or it was stored under another revision, dtype, layout or tenant: that is another namespace."],
  evicted: ["evicted", "It was here and had to make room. A larger host.size or disk.size would have kept it."],
  damaged: ["damaged", "Its bytes were wrong when they were last read, so it was forgotten; it is stored anew when it is next computed."],
  tier_down: ["tier down", "A tier that may have it does not answer: see the errors."],
  deadline: ["deadline", "The bucket did not say in time. Its answer is kept for the next lookup."],
  too_slow: ["too slow", "To load it would take longer than to compute it (s3.prefill_tokens_per_s)."],
};

export function make(tag, properties = {}, ...children) {
  const element = tag.startsWith("svg:")
    ? document.createElementNS("http://www.w3.org/2000/svg", tag.slice(4))
    : document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === null || value === undefined) continue;
    if (name === "class") element.setAttribute("class", value);
    else if (name === "text") element.textContent = value;
    else if (name === "data") Object.assign(element.dataset, value);
    else element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

export const find = (id) => document.getElementById(id);

// Changed only where it differs: what is selected, focused or being read stays as it is.
export function put(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

const LANGUAGE = "en";
const whole = new Intl.NumberFormat(LANGUAGE, { maximumFractionDigits: 0 });
const short = new Intl.NumberFormat(LANGUAGE, { notation: "compact", maximumFractionDigits: 1 });

export const count = (number) => whole.format(number);
export const few = (number) => (number < 10000 ? whole.format(number) : short.format(number));
export const some = (number, one, many = `${one}s`) => `${count(number)} ${number === 1 ? one : many}`;

export function size(bytes) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  let at = 0;
  while (bytes >= 1000 && at < units.length - 1) {
    bytes /= 1024;
    at += 1;
  }
  // Rounded down, as the command line does.
  return `${at === 0 || bytes >= 100 ? Math.floor(bytes) : (Math.floor(10 * bytes) / 10).toFixed(1)} ${units[at]}`;
}

export function percent(part, of) {
  if (!of) return "–";
  const share = (100 * part) / of;
  if (share > 0 && share < 1) return "<1 %";
  if (share > 99 && share < 100) return "99 %";
  return `${Math.round(share)} %`;
}

export function age(seconds) {
  if (seconds < 0.5) return "now";
  if (seconds < 90) return `${Math.round(seconds)} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  if (seconds < 129600) return `${Math.round(seconds / 3600)} h`;
  return `${Math.round(seconds / 86400)} days`;
}

export const millis = (ms) => (ms < 0.1 ? "<0.1 ms" : ms < 10 ? `${ms.toFixed(1)} ms` : `${count(ms)} ms`);

export function clock(at) {
  return new Date(at * 1000).toLocaleTimeString("en-GB");
}

export const sum = (counts) => Object.values(counts).reduce((total, each) => total + each, 0);
