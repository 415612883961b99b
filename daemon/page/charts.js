// Two charts in SVG: what of each moment's tokens was here and in which tier, and hits by the size of a tier.

import { TIERS, clock, few, find, make, percent, put, size, sum } from "./words.js";

const HEIGHT = 200, LEFT = 46, RIGHT = 10, TOP = 10, BOTTOM = 24, WINDOW_S = 300;
let width = 600; // that of the box drawn into, so that letters are as large in all of them
const x = (share) => LEFT + share * (width - LEFT - RIGHT);
const y = (share) => TOP + (1 - share) * (HEIGHT - TOP - BOTTOM);
const fixed = (number) => number.toFixed(1);

function grid() {
  return [0, 0.25, 0.5, 0.75, 1].flatMap((share) => [
    make("svg:line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: y(share), y2: y(share) }),
    make("svg:text", { class: "label", x: LEFT - 6, y: y(share) + 4, "text-anchor": "end", text: `${100 * share} %` }),
  ]);
}

// A chart that is read with the pointer or the arrow keys: say(index) is what stands there.
function readable(box, name, points, say) {
  const stage = make("div", { class: "stage", role: "slider", tabindex: 0, "aria-label": name, "aria-valuemin": 0 });
  const told = make("p", { class: "told" });
  const cursor = make("svg:line", { class: "cursor", y1: TOP, y2: HEIGHT - BOTTOM, x1: 0, x2: 0, visibility: "hidden" });
  const chart = { stage, told, cursor, points, say, at: null, home: null }; // home is told of while nobody reads; null: the last
  chart.show = (at, moved = true) => {
    if (!chart.points.length) return;
    chart.at = moved ? Math.max(0, Math.min(chart.points.length - 1, at)) : null;
    const shown = chart.at ?? chart.home ?? chart.points.length - 1;
    const text = chart.say(shown);
    put(told, text);
    stage.setAttribute("aria-valuemax", chart.points.length - 1);
    stage.setAttribute("aria-valuenow", shown);
    stage.setAttribute("aria-valuetext", text);
    cursor.setAttribute("x1", chart.points[shown]);
    cursor.setAttribute("x2", chart.points[shown]);
    cursor.setAttribute("visibility", chart.at === null ? "hidden" : "visible");
  };
  stage.addEventListener("pointermove", (event) => {
    const area = stage.getBoundingClientRect();
    const wanted = ((event.clientX - area.left) / area.width) * width;
    let nearest = 0;
    chart.points.forEach((at, index) => {
      if (Math.abs(at - wanted) < Math.abs(chart.points[nearest] - wanted)) nearest = index;
    });
    chart.show(nearest);
  });
  const rest = () => chart.show(0, false);
  stage.addEventListener("pointerleave", rest);
  stage.addEventListener("blur", rest);
  stage.addEventListener("keydown", (event) => {
    const last = chart.points.length - 1, from = chart.at ?? last;
    const to = { ArrowLeft: from - 1, ArrowDown: from - 1, ArrowRight: from + 1, ArrowUp: from + 1, Home: 0, End: last }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    chart.show(to);
  });
  box.replaceChildren(stage, told);
  return chart;
}

const inside = (box) => Math.max(240, box.clientWidth - 10);

function draw(chart, ...parts) {
  chart.stage.replaceChildren(make("svg:svg", { viewBox: `0 0 ${width} ${HEIGHT}`, "aria-hidden": "true" }, ...parts, chart.cursor));
}

// What stands below a chart, anew. The chart itself stays where it is: one that is taken out loses the reader's focus.
function under(box, element) {
  box.querySelector(".under")?.remove();
  element.classList.add("under");
  box.append(element);
}

let history = null, bought = null;

// Periods put together until each has a width that can be seen; a gap is a moment in which nothing was asked.
function gathered(periods, period_s, unit, now) {
  const last = Math.ceil(now / period_s) * period_s;
  const first = Math.min(last - WINDOW_S, Math.max(periods[0].at, last - 3600));
  const wide = Math.max(period_s, Math.ceil((last - first) / 90 / period_s) * period_s);
  const bins = new Map();
  for (const period of periods) {
    if (period.at < first) continue;
    const at = first + Math.floor((period.at - first) / wide) * wide;
    const bin = bins.get(at) ?? { at, asked: 0, matched: {} };
    bin.asked += period[`asked_${unit}`];
    for (const [tier, amount] of Object.entries(period[`matched_${unit}`])) bin.matched[tier] = (bin.matched[tier] ?? 0) + amount;
    bins.set(at, bin);
  }
  return { bins: [...bins.values()], first, last, wide };
}

export function showHistory(page) {
  const unit = document.querySelector("input[name=unit]:checked").value;
  const periods = page.history.filter((period) => period[`asked_${unit}`]);
  const box = find("history");
  if (!periods.length) {
    history = null;
    box.replaceChildren(make("p", { class: "quiet", text: "Nothing was asked for in the last hour." }));
    return;
  }
  const { bins, first, last, wide } = gathered(periods, page.period_s, unit, page.at);
  width = inside(box);
  const place = (at) => x((at - first) / (last - first));
  history ??= readable(box, "Hit rate over the last hour, by moment", [], () => "");
  history.points = bins.map((bin) => place(bin.at + wide / 2));
  history.say = (index) => {
    const bin = bins[index];
    const parts = TIERS.filter((tier) => bin.matched[tier]).map((tier) => `${tier} ${percent(bin.matched[tier], bin.asked)}`);
    return `${clock(bin.at)}: ${percent(sum(bin.matched), bin.asked)} of ${few(bin.asked)} ${unit} were here${parts.length ? ` (${parts.join(", ")})` : ""}`;
  };
  const bars = bins.flatMap((bin) => {
    let under = 0;
    const left = place(bin.at), broad = Math.max(1, place(bin.at + wide) - left - 1);
    return TIERS.filter((tier) => bin.matched[tier]).map((tier) => {
      const share = Math.min(1 - under, bin.matched[tier] / bin.asked);
      const bar = make("svg:rect", { class: `tier-${tier}`, x: fixed(left), width: fixed(broad), y: fixed(y(under + share)), height: fixed(y(under) - y(under + share)) });
      under += share;
      return bar;
    });
  });
  const ground = bins.map((bin) => make("svg:rect", { class: "asked", x: fixed(place(bin.at)), width: fixed(Math.max(1, place(bin.at + wide) - place(bin.at) - 1)), y: fixed(y(1)), height: fixed(y(0) - y(1)) }));
  const times = [0, 1].map((end) => make("svg:text", { class: "label", x: x(end), y: HEIGHT - 6, "text-anchor": end ? "end" : "start", text: clock(end ? last : first) }));
  draw(history, ...ground, ...grid(), ...bars, ...times);
  const used = TIERS.filter((tier) => bins.some((bin) => bin.matched[tier]));
  const legend = make("ul", { class: "legend" }, ...used.map((tier) => make("li", {}, make("span", { class: `swatch tier-${tier}`, "aria-hidden": "true" }), tier)),
    make("li", {}, make("span", { class: "swatch asked", "aria-hidden": "true" }), "asked for and not here"));
  under(box, legend);
  history.show(history.at ?? 0, history.at !== null);
}

export function showWhatif(page) {
  const { whatif } = page;
  find("whatif-section").hidden = !whatif;
  if (!whatif) return;
  const names = TIERS.filter((tier) => whatif.tiers[tier]);
  const choice = find("whatif-tiers");
  if (choice.dataset.names !== names.join()) {
    choice.dataset.names = names.join();
    choice.replaceChildren(choice.querySelector("legend"), ...names.map((tier, index) => {
      const input = make("input", { type: "radio", name: "whatif", value: tier });
      input.checked = index === 0;
      return make("label", {}, input, ` ${tier}`);
    }));
  }
  const box = find("whatif");
  if (!whatif.sample.enough || !names.length) {
    bought = null;
    box.replaceChildren(make("p", { class: "quiet", text: "Engines have not asked for enough different blocks yet to tell." }));
    return;
  }
  const tier = choice.querySelector("input:checked").value;
  const points = whatif.tiers[tier];
  width = inside(box);
  const now = page.status.tiers[tier]?.capacity_bytes ?? points[2].bytes;
  const low = Math.log2(points[0].bytes), high = Math.log2(points.at(-1).bytes);
  const place = (bytes) => x(0.03 + (0.94 * (Math.log2(Math.max(1, bytes)) - low)) / (high - low || 1));
  if (bought?.tier !== tier) bought = Object.assign(readable(box, `Share of blocks found, by the size of the ${tier} tier`, [], () => ""), { tier });
  bought.points = points.map((each) => place(each.bytes));
  bought.home = Math.max(0, points.findIndex((each) => each.bytes >= now * 0.98));
  bought.say = (index) => {
    const each = points[index], factor = each.bytes / now;
    const times = Math.abs(factor - 1) < 0.02 ? "as it is" : `${factor < 1 ? factor.toFixed(2) : Math.round(factor)} times`;
    return `${size(each.bytes)} (${times}): ${percent(each.hits, 1)} of the blocks asked for would be found`;
  };
  const line = points.map((each) => `${fixed(place(each.bytes))},${fixed(y(each.hits))}`).join(" ");
  draw(bought, ...grid(),
    make("svg:line", { class: "here", x1: place(now), x2: place(now), y1: TOP, y2: HEIGHT - BOTTOM }),
    make("svg:polyline", { class: `line stroke-${tier}`, points: line }),
    ...points.map((each) => make("svg:circle", { class: `tier-${tier}`, cx: place(each.bytes), cy: y(each.hits), r: 4 })),
    ...points.map((each, at) => (width > 480 || at % 2) && make("svg:text", { class: "label", x: place(each.bytes), y: HEIGHT - 6,
      "text-anchor": at === points.length - 1 ? "end" : "middle", text: size(each.bytes) })));
  under(box, make("p", { class: "quiet", text: `Estimated from ${few(whatif.requests)} prompts that engines asked for; ${whatif.scope}. The upright line is the size of now.` }));
  bought.show(bought.at ?? 0, bought.at !== null);
}
