// The four questions that whoever opens the page has, answered in a word and a sentence each.

import { REASONS, TIERS, count, few, find, make, percent, size, some, sum } from "./words.js";

const FULL_PERCENT = 95;

function card(id, question, word, sentence, tone) {
  return make("li", { id, class: "card", data: { tone } },
    make("h2", { text: question }), make("p", { class: "word", text: word }), make("p", { text: sentence }));
}

function pays(history, totals) {
  const asked = history.reduce((all, period) => all + period.asked_tokens, 0);
  const here = history.reduce((all, period) => all + sum(period.matched_tokens), 0);
  const ever = totals ? ` Since start: ${percent(totals.matched_tokens, totals.asked_tokens)}.` : "";
  if (!asked) return ["–", `No token was asked for in the last hour.${ever}`, "plain"];
  return [percent(here, asked),
    `Of ${few(asked)} tokens asked for in the last hour, ${few(here)} were here and need not be computed.${ever}`,
    here / asked >= 0.3 ? "good" : "plain"];
}

function full(tiers) {
  const bounded = TIERS.filter((name) => tiers[name]?.capacity_bytes);
  const at = (name) => tiers[name].used_bytes / tiers[name].capacity_bytes;
  const down = TIERS.filter((name) => ["down", "stuck"].includes(tiers[name]?.mode));
  if (down.length) return [`${down.join(", ")} down`, "Lookups go on without it: see the errors below.", "bad"];
  const over = bounded.filter((name) => Math.round(100 * at(name)) >= FULL_PERCENT);
  if (!over.length) {
    const most = bounded.sort((a, b) => at(b) - at(a))[0];
    return ["none", most ? `The fullest is ${most}: ${percent(tiers[most].used_bytes, tiers[most].capacity_bytes)}.` : "", "good"];
  }
  const gone = over.map((name) => `${count(tiers[name].counters.evictions.capacity ?? 0)} from ${name}`);
  return [over.join(", "), `Full is what a cache is for: new blocks push out old ones. Evicted so far: ${gone.join(", ")}.`, "plain"];
}

function misses(lookups) {
  const reasons = new Map();
  for (const { first_miss } of lookups) if (first_miss) reasons.set(first_miss.reason, (reasons.get(first_miss.reason) ?? 0) + 1);
  if (!reasons.size) return lookups.length ? ["they do not", `All of the last ${lookups.length} were found whole.`, "good"] : ["–", "Nothing was asked yet.", "plain"];
  const missed = sum(Object.fromEntries(reasons));
  const [reason, times] = [...reasons].sort((a, b) => b[1] - a[1])[0];
  const [word, advice] = REASONS[reason] ?? [reason, ""];
  return [word, `${count(missed)} of the last ${some(lookups.length, "lookup")} missed${missed > 1 ? `, ${times === missed ? "all" : count(times)} of them for this` : ""}. ${advice}`, reason === "tier_down" ? "bad" : "plain"];
}

// The step that buys most: for each tier what twice its size would find.
export function buys(whatif) {
  if (!whatif?.sample.enough) return ["–", "Not enough was asked yet to tell.", "plain"];
  const gains = Object.entries(whatif.tiers).map(([name, points]) => {
    const now = points[2], twice = points[3];
    return { name, now, twice, gain: twice.hits - now.hits };
  });
  if (!gains.length) return ["–", "No tier has a bound.", "plain"];
  const best = gains.sort((a, b) => b.gain - a.gain)[0];
  const points = Math.round(100 * best.gain);
  if (points < 1) return ["little", "Twice the memory of any tier would find hardly more.", "good"];
  return [`+${points} points`,
    `Twice the ${best.name} tier (${size(best.twice.bytes)}) would find ${percent(best.twice.hits, 1)} of blocks instead of ${percent(best.now.hits, 1)}.`, "plain"];
}

export function showAnswers(page) {
  const { status, history, lookups, whatif, tenant } = page;
  const cards = [card("pays", "Does the cache pay?", ...pays(history, status.lookups))];
  if (!tenant) cards.push(card("full", "Which tier is full?", ...full(status.tiers)));
  cards.push(card("misses", "Why do prompts miss?", ...misses(lookups)));
  if (whatif) cards.push(card("buys", "What would more memory buy?", ...buys(whatif)));
  const list = find("answers");
  const signature = cards.map((each) => each.textContent + each.dataset.tone).join("\n");
  if (list.dataset.shown !== signature) {
    list.dataset.shown = signature;
    list.replaceChildren(...cards);
  }
}
