// The tiers as steps, the quickest on top: how full each is, and what moves between it and the one above.

import { TIERS, age, count, find, make, percent, put, size, some } from "./words.js";

const ABSENT = {
  gpu: "off: gpu.enabled keeps what is hottest in GPU memory",
  disk: "off: disk.size keeps more than memory holds",
  s3: "off: s3.enabled shares blocks between nodes",
};
const WORDS = { gpu: "GPU memory", host: "shared memory", disk: "local disk", s3: "object storage" };

let before = null;

// Bytes a second by tier, from the counters of two documents.
function rates(tiers, at) {
  const now = Object.fromEntries(Object.entries(tiers).map(([name, tier]) => [name, tier.counters]));
  const last = before;
  before = { at, now };
  if (!last || at <= last.at) return {};
  const per = (name, key) => Math.max(0, (now[name][key] - (last.now[name]?.[key] ?? 0)) / (at - last.at));
  return Object.fromEntries(Object.keys(now).map((name) => [name, { down: per(name, "put_bytes"), up: per(name, "get_bytes") }]));
}

export function forgetRates() {
  before = null;
}

function step(name) {
  const field = (kind, props = {}) => make("span", { data: { is: kind }, ...props });
  return make("li", { class: "step", id: `tier-${name}`, data: { tier: name } },
    make("p", { class: "flow" }, field("down", { class: "down" }), field("up", { class: "up" })),
    make("div", { class: "slab" },
      make("div", { class: "head" },
        make("h3", {}, make("span", { text: name }), make("small", { text: WORDS[name] })),
        field("mode", { class: "mode" }), field("used", { class: "amount" })),
      make("div", { class: "bar", role: "meter", "aria-label": `${name}: used`, "aria-valuemin": 0, "aria-valuemax": 100, "aria-valuenow": 0 },
        field("fill", { class: "fill" }), field("lease", { class: "lease" })),
      field("facts", { class: "facts" })));
}

function facts(tier) {
  const parts = [some(tier.blocks, "block")];
  parts.push(`${count(tier.leased_blocks)} leased`);
  if (tier.reserved_blocks) parts.push(`${count(tier.reserved_blocks)} being written`);
  const flying = tier.in_flight_bytes ? ` (${size(tier.in_flight_bytes)})` : "";
  parts.push(`${count(tier.in_flight_blocks)} in flight${flying}`);
  if (tier.flow?.writes_dropped) parts.push(`${count(tier.flow.writes_dropped)} writes dropped`);
  return parts.join(" · ");
}

function fill(li, name, tier, rate) {
  const of = (kind) => li.querySelector(`[data-is="${kind}"]`);
  const bad = ["down", "stuck"].includes(tier.mode);
  li.dataset.state = bad ? "bad" : "on";
  put(of("mode"), tier.mode);
  const share = tier.capacity_bytes ? tier.used_bytes / tier.capacity_bytes : 0;
  put(of("used"), tier.capacity_bytes
    ? `${size(tier.used_bytes)} of ${size(tier.capacity_bytes)} · ${percent(tier.used_bytes, tier.capacity_bytes)}`
    : name === "s3" ? "shared, no bound of its own" : size(tier.used_bytes));
  const leased = tier.blocks ? share * Math.min(1, tier.leased_blocks / tier.blocks) : 0;
  of("fill").style.width = `${100 * Math.min(1, share)}%`;
  of("lease").style.width = `${100 * Math.min(share, leased)}%`;
  const bar = li.querySelector(".bar");
  bar.hidden = !tier.capacity_bytes;
  bar.setAttribute("aria-valuenow", Math.round(100 * share));
  put(of("facts"), facts(tier));
  const moving = (bytes) => (bytes >= 1 ? `${size(bytes)}/s` : "–");
  put(of("down"), `↓ ${moving(rate?.down ?? 0)}`);
  put(of("up"), `↑ ${moving(rate?.up ?? 0)}`);
  of("down").dataset.moves = (rate?.down ?? 0) >= 1;
  of("up").dataset.moves = (rate?.up ?? 0) >= 1;
}

function off(li, text) {
  li.dataset.state = "off";
  put(li.querySelector('[data-is="mode"]'), text);
}

// What a tenant may see of a tier: how much of it is the tenant's, and how much may be.
function share(li, tier) {
  li.dataset.state = "share";
  const limit = tier.limit_bytes;
  const of = (kind) => li.querySelector(`[data-is="${kind}"]`);
  put(of("mode"), limit === null ? "no limit" : "your share");
  put(of("used"), limit === null ? size(tier.used_bytes) : `${size(tier.used_bytes)} of ${size(limit)} · ${percent(tier.used_bytes, limit)}`);
  const full = limit ? Math.min(100, (100 * tier.used_bytes) / limit) : 0;
  of("fill").style.width = `${full}%`;
  of("lease").style.width = "0";
  put(of("facts"), "");
  const bar = li.querySelector(".bar");
  bar.hidden = limit === null;
  bar.setAttribute("aria-valuenow", Math.round(full));
}

export function showTerraces(page) {
  const { tiers } = page.status;
  const list = find("terraces");
  const shown = page.tenant ? TIERS.filter((name) => tiers[name]) : TIERS;
  const steps = new Map([...list.children].map((li) => [li.dataset.tier, li]));
  if (shown.join() !== [...steps.keys()].join()) {
    list.replaceChildren(...shown.map((name) => steps.get(name) ?? step(name)));
  }
  const rate = page.tenant ? {} : rates(tiers, page.at);
  for (const li of list.children) {
    const name = li.dataset.tier;
    if (page.tenant) share(li, tiers[name]);
    else if (tiers[name]) fill(li, name, tiers[name], rate[name]);
    else off(li, name === "gpu" && page.status.gpu_tier.state !== "off" ? page.status.gpu_tier.reason : ABSENT[name]);
  }
}

export const lastError = (tier) => (tier.last_error_age_s === null ? "now" : `${age(tier.last_error_age_s)} ago`);
