// The tables, and the errors with what to do about them. Rows are made anew only where what they say has changed.

import { lastError } from "./terraces.js";
import { REASONS, TIERS, age, clock, count, find, make, millis, percent, size, some } from "./words.js";

const shown = new Map();

function changed(id, value) {
  const text = JSON.stringify(value);
  if (shown.get(id) === text) return false;
  shown.set(id, text);
  return true;
}

// columns: name -> cell(row), an element or text; a name that begins with # is of numbers.
function table(id, rows, columns, none, total = rows.length) {
  const texts = rows.map((row) => Object.values(columns).map((cell) => cell(row)));
  if (!changed(id, [texts.map((cells) => cells.map((cell) => cell?.outerHTML ?? cell)), total])) return;
  const box = find(id);
  if (!rows.length) return box.replaceChildren(make("p", { class: "quiet", text: none }));
  const names = Object.keys(columns);
  const side = (index) => (names[index].startsWith("#") ? "number" : null);
  const head = make("tr", {}, ...names.map((name, index) => make("th", { scope: "col", class: side(index), text: name.replace("#", "") })));
  const body = texts.map((cells) => make("tr", {}, ...cells.map((cell, index) =>
    cell instanceof Element ? make("td", { class: side(index) }, cell) : make("td", { class: side(index), text: cell }))));
  box.replaceChildren(make("table", {}, make("thead", {}, head), make("tbody", {}, ...body)),
    ...(total > rows.length ? [make("p", { class: "quiet", text: `and ${count(total - rows.length)} more: /v1/status has all` })] : []));
}

function split(row) {
  const bar = make("span", { class: "split", role: "img",
    "aria-label": TIERS.filter((tier) => row.split[tier]).map((tier) => `${tier} ${row.split[tier]}`).join(", ") || "nothing found" });
  for (const tier of TIERS) {
    if (!row.split[tier]) continue;
    const part = make("span", { class: `tier-${tier}` });
    part.style.width = `${(100 * row.split[tier]) / row.asked_blocks}%`;
    bar.append(part);
  }
  return bar;
}

function why(row) {
  if (!row.first_miss) return make("span", { class: "quiet", text: "all found" });
  const { index, reason } = row.first_miss;
  const [word] = REASONS[reason] ?? [reason];
  const where = reason === "shorter_than_block" ? ` (${row.block_tokens} tokens)` : row.asked_blocks && reason !== "unknown_namespace" ? ` at block ${index}` : "";
  return make("span", { data: { reason } }, make("b", { text: word }), where);
}

export function showLookups(page) {
  const only = find("misses-only").checked;
  const rows = page.lookups.filter((row) => !only || row.first_miss).reverse();
  const columns = {
    time: (row) => clock(row.at),
    namespace: (row) => row.model || (row.namespace_id ?? "?").slice(0, 8),
    "#found": (row) => `${count(row.matched_blocks)} of ${count(row.asked_blocks)}`,
    "": split,
    tiers: (row) => TIERS.filter((tier) => row.split[tier]).map((tier) => `${tier} ${row.split[tier]}`).join(", ") || "–",
    "#to load": (row) => (row.matched_blocks ? millis(row.load_ms) : "–"),
    "first miss": why,
  };
  table("lookups", rows, columns, only && page.lookups.length ? "None of the last lookups missed." : "Nothing was asked yet.");
}

const models = (name) => (row) => row[name] || "–";

export function showRest(page) {
  const { status, totals } = page;
  table("sessions", status.sessions, {
    engine: models("engine"), namespace: (row) => row.model || row.namespace_id.slice(0, 8), tenant: models("tenant"),
    shard: (row) => (row.shard === null ? "all" : String(row.shard)), "#age": (row) => age(row.age_s),
    "#leases": (row) => count(row.leases), "#blocks leased": (row) => count(row.leased_blocks),
    "#on their way": (row) => count(row.pending_blocks), "#being written": (row) => count(row.reserved_blocks),
    way: (row) => (row.transport === "ipc" ? "GPU memory" : "shared memory"),
  }, "No engine is connected.", totals.sessions);
  const tiers = TIERS.filter((tier) => status.namespaces.some((row) => row.used_bytes[tier] !== undefined));
  table("namespaces", status.namespaces, {
    model: (row) => row.model || "not said yet", namespace: (row) => row.namespace_id.slice(0, 12), tenant: models("tenant"),
    "#lookups": (row) => count(row.lookups), "#found": (row) => percent(row.matched_tokens, row.asked_tokens),
    ...Object.fromEntries(tiers.map((tier) => [`#${tier}`, (row) => size(row.used_bytes[tier])])),
    "#tokens a block": (row) => count(row.block_tokens), "#shards": (row) => count(row.shards), dtype: models("dtype"),
  }, "No namespace is known yet.", totals.namespaces);
  find("tenants-section").hidden = !status.tenants?.length;
  if (status.tenants) tenants(status);
  find("gpus-section").hidden = status.gpus === undefined;
  if (status.gpus) gpus(status);
  errors(status, page.tenant);
}

function tenants(status) {
  const tiers = TIERS.filter((tier) => status.tenants.some((row) => row.tiers[tier]));
  table("tenants", status.tenants, {
    tenant: (row) => row.tenant, "#namespaces": (row) => count(row.namespaces), "#lookups": (row) => count(row.lookups),
    "#found": (row) => percent(row.matched_tokens, row.asked_tokens),
    ...Object.fromEntries(tiers.map((tier) => [`#${tier}`, (row) => {
      const { used_bytes, limit_bytes } = row.tiers[tier];
      return limit_bytes === null ? size(used_bytes) : `${size(used_bytes)} of ${size(limit_bytes)}`;
    }])),
  }, "");
}

function gpus(status) {
  const known = (value, text) => (value === null || value === undefined ? "–" : text(value));
  table("gpus", status.gpus, {
    gpu: (row) => row.name ?? row.uuid, uuid: (row) => row.uuid.slice(0, 12),
    "#memory": (row) => known(row.memory_used_bytes, (used) => `${size(used)} of ${known(row.memory_total_bytes, size)}`),
    "#busy": (row) => known(row.utilisation_percent, (value) => `${value} %`), "#°C": (row) => known(row.temperature_c, String),
    "not told": (row) => Object.entries(row.reasons).map(([what, reason]) => `${what}: ${reason}`).join("; ") || "–",
  }, status.gpus_reason ?? "No GPU.");
}

// A tenant is told of no tier's errors, so that there are none is not known to its page.
function errors(status, tenant) {
  const list = [];
  for (const reason of status.not_ready ?? []) list.push({ where: "not ready", what: reason, advice: "Requests are refused until this is over." });
  for (const [name, tier] of Object.entries(status.tiers)) {
    if (tier.last_error) list.push({ where: `${name} tier`, when: lastError(tier), what: tier.last_error, advice: tier.advice, event: tier.last_event, bad: ["down", "stuck"].includes(tier.mode) });
    const dropped = tier.flow?.writes_dropped;
    if (dropped) list.push({ where: `${name} tier`, what: `${some(dropped, "block")} (${size(tier.flow.writes_dropped_bytes)}) not written through`, advice: name === "s3" ? "The bucket is slower than what engines store, or down: raise s3.queue, or see the tier's last error." : "The disk is slower than what engines store: raise daemon.queue, or take a quicker disk." });
    if (tier.counters?.checksum_failures) list.push({ where: `${name} tier`, what: `${some(tier.counters.checksum_failures, "block")} did not match the checksum and were forgotten`, advice: "terracekv verify looks at all of them; see what the tier stands on." });
  }
  const died = status.died ? Object.entries({ ...status.died.threads, ...status.died.tasks }) : [];
  for (const [name, times] of died) list.push({ where: name, what: `failed ${count(times)} times and was begun again`, advice: "The log of the daemon has why." });
  if (status.access?.last_error) list.push({ where: "access file", what: status.access.last_error, advice: "Tokens and tenants stay as they were until it can be read." });
  find("errors-section").hidden = Boolean(tenant) && !list.length;
  if (!changed("errors", list)) return;
  find("errors").replaceChildren(...(list.length ? list.map(error) : [make("li", { class: "fine", text: "None since start." })]));
}

function error({ where, when, what, advice, event, bad }) {
  return make("li", { class: "error", data: { bad: Boolean(bad) } },
    make("p", {}, make("b", { text: where }), when ? ` (${when})` : "", ": ", what),
    advice && make("p", { text: advice }), event && make("p", { class: "quiet", text: event }));
}
