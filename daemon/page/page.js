// The status page: what the daemon says goes in by the stream, and each part of the page shows its own of it.

import { showAnswers } from "./answers.js";
import { showHistory, showWhatif } from "./charts.js";
import { Stream, headers, token } from "./stream.js";
import { showLookups, showRest } from "./tables.js";
import { forgetRates, showTerraces } from "./terraces.js";
import { age, find, put } from "./words.js";

const LOOKUPS = 100, HOUR_S = 3600, WHATIF_MS = 15000;

const page = { status: null, tenant: null, at: 0, period_s: 15, totals: {}, lookups: [], history: [], whatif: null };
let canAskWhatif = null;

// What is new after what there is: a document may say again what an earlier one said.
function after(old, fresh, by, most) {
  const again = new Set(fresh.map((each) => each[by]));
  return [...old.filter((each) => !again.has(each[by])), ...fresh].slice(-most);
}

function heard(name, document) {
  if (name === "past") {
    Object.assign(page, { lookups: document.lookups, history: document.history, period_s: document.period_s });
    forgetRates();
    canAskWhatif = null;
    return;
  }
  const { status, tenant, at, totals } = document;
  Object.assign(page, { status, tenant, at, totals });
  page.lookups = after(page.lookups, document.lookups, "number", LOOKUPS);
  page.history = after(page.history, document.history, "at", HOUR_S / page.period_s).filter((each) => each.at > at - HOUR_S);
  show();
  if (!performance.getEntriesByName("usable").length) performance.mark("usable");
  if (canAskWhatif === null) askWhatif();
}

function show() {
  if (!page.status) return;
  const { status, tenant } = page;
  const nothing = !page.lookups.length && !status.lookups?.lookups && !status.sessions.length;
  find("empty").hidden = !nothing;
  find("content").hidden = false;
  put(find("about"), [/^\d/.test(status.version) ? `version ${status.version}` : null, tenant ? `tenant ${tenant}` : `up ${age(status.uptime_s)}`,
    status.ready ? null : "not ready"].filter(Boolean).join(" · "));
  showAnswers(page);
  showTerraces(page);
  showHistory(page);
  showLookups(page);
  showRest(page);
}

// Whether this daemon can tell what more memory would buy is among its routes; a tenant is not told.
async function askWhatif() {
  try {
    if (canAskWhatif === null) {
      canAskWhatif = false;
      if (!page.tenant) {
        const answer = await fetch("/openapi.json", { headers: headers() });
        canAskWhatif = answer.ok && "/v1/whatif" in (await answer.json()).paths;
      }
    }
    const answer = canAskWhatif && !document.hidden ? await fetch("/v1/whatif", { headers: headers(), cache: "no-store" }) : null;
    if (answer?.ok) page.whatif = await answer.json();
    else if (answer) canAskWhatif = false;
  } catch {
    return; // the stream says that the daemon is gone
  }
  if (!canAskWhatif) page.whatif = null;
  showWhatif(page);
  if (page.status) showAnswers(page);
}

function changed(state, { message, wait, seconds, silent, wrong, refused }) {
  const link = find("link");
  link.dataset.state = state;
  document.body.dataset.link = state;
  const silence = silent === undefined ? "" : age(silent / 1000);
  put(link, { connecting: "connecting", live: "live", stale: "stale", gone: "disconnected", denied: "token needed" }[state]);
  find("gone").hidden = state !== "gone" && state !== "stale";
  find("denied").hidden = state !== "denied";
  if (state === "stale") {
    put(find("gone-title"), "The daemon is silent");
    put(find("gone-text"), `Nothing came for ${silence}; what you see is of then. It is stopped or hangs, or the network does: see its log.`);
  } else if (state === "gone") {
    put(find("gone-title"), refused ? "The daemon does not show its status now" : "The daemon is not there");
    const since = seconds === null || seconds === undefined ? "" : ` What you see is ${age(seconds)} old.`;
    put(find("gone-text"), `${message}.${since} Trying again every ${age(Math.max(1, wait / 1000))}.${refused ? "" : " Engines go on without it: they compute what they cannot load."}`);
  } else if (state === "denied") {
    find("content").hidden = true;
    find("empty").hidden = true;
    put(find("denied-text"), wrong ? `That one is not enough: ${message}.` : "Paste one that has the right read.");
    token.forget();
    find("token").focus();
  } else if (state === "connecting" && !page.status) {
    find("content").hidden = true;
  }
}

const stream = new Stream(heard, changed);

find("retry").addEventListener("click", () => stream.start());
find("token-form").addEventListener("submit", (event) => {
  event.preventDefault();
  token.set(find("token").value.trim());
  find("token").value = "";
  stream.start();
});
// A link sends no token. Where there is one, what it leads to is fetched with it and shown from here.
document.querySelector("footer").addEventListener("click", async (event) => {
  const link = event.target.closest("a");
  if (!link || !token.get()) return;
  event.preventDefault();
  try {
    const answer = await fetch(link.href, { headers: headers(), cache: "no-store" });
    location.assign(URL.createObjectURL(await answer.blob()));
  } catch {
    return; // the stream says that the daemon is gone
  }
});
find("unit").addEventListener("change", () => page.status && showHistory(page));
find("whatif-tiers").addEventListener("change", () => showWhatif(page));
find("misses-only").addEventListener("change", () => showLookups(page));
find("empty-curl").textContent = `curl -s ${location.origin}/v1/lookup -H 'Content-Type: application/json' -d '{"namespace": "MODEL", "tokens": [1, 2, 3]}'`;
let broad = 0; // charts are drawn for the width they have, so that letters are as large in all of them
new ResizeObserver(([{ contentRect }]) => {
  if (Math.round(contentRect.width) === broad || !page.status) return;
  broad = Math.round(contentRect.width);
  showHistory(page);
  showWhatif(page);
}).observe(find("history"));
setInterval(() => canAskWhatif && stream.state === "live" && askWhatif(), WHATIF_MS);
stream.start();
