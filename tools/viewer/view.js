"use strict";
// The page of tools/view.py. What a model wrote is only ever set as text (`textContent`).

// --- elements and numbers ------------------------------------------------------------------------

const parse = (id) => JSON.parse(document.getElementById(id).textContent);
const head = parse("head");
const groups = head.groups;
const SVG = "http://www.w3.org/2000/svg";

/** An element: attributes, `on...` handlers, then children; text becomes a text node. */
function el(tag, attributes = {}, ...children) {
  const is = tag === "svg" || tag === "rect" || tag === "line";
  const node = is ? document.createElementNS(SVG, tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value != null) node.setAttribute(name, value);
  }
  node.append(...children.filter((one) => one != null && one !== ""));
  return node;
}

const HIDDEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u2069\ufeff]/g;

/** The text with signs for characters that would be unseen, or turn the line around. */
const visible = (text) =>
  text.replace(HIDDEN, (one) => `\u27e8U+${one.charCodeAt(0).toString(16).toUpperCase().padStart(4, "0")}\u27e9`);

const small = (value) => (value === 0 ? "0" : Math.abs(value) < 1e-3 || Math.abs(value) >= 1e4
  ? value.toExponential(2) : Number(value.toPrecision(3)).toString());
const around = (value) => `1 ${value < 1 ? "\u2212" : "+"} ${small(Math.abs(value - 1))}`;
const percent = (share) => `${(100 * share).toFixed(1)} %`;

// --- state, in the address of the page -----------------------------------------------------------

const state = { run: "0", step: "", c: "", verdict: "", sort: "step", color: "", q: "", at: "", view: "group" };
for (const [name, value] of new URLSearchParams(location.hash.slice(1)))
  if (name in state) state[name] = value;
// A link may be older than the page, which has fewer runs.
state.run = `${Math.min(Math.max(Math.trunc(Number(state.run)) || 0, 0), head.runs.length - 1)}`;

const keyOf = (group) => `${group.run}/${group.step}/${group.problem}`;

function set(changes) {
  Object.assign(state, changes);
  const kept = Object.entries(state).filter(([, value]) => value !== "");
  history.replaceState(null, "", `#${new URLSearchParams(kept)}`);
  if (!("at" in changes && Object.keys(changes).length === 2)) drawList();
  else markChosen();
  drawMain();
}

const open = (group) => set({ at: keyOf(group), view: "group" });

// --- what the tokens can be coloured by ----------------------------------------------------------

const COLORS = {
  log_ratio: {
    name: "log-ratio",
    says: "log-prob at its update minus old log-prob: blue less likely, orange more",
    diverges: true,
  },
  mismatch: {
    name: "trainer \u2212 engine",
    says: "the trainer's log-prob at the start of the step minus the engine's while sampling",
    diverges: true,
  },
  log_probs: { name: "log-prob", says: "the trainer's at the start of the step: darker is less likely" },
  policy_versions: { name: "policy version", says: "of the weights that sampled the token: darker is newer" },
  response_mask: { name: "who wrote it", says: "blue: the model sampled it; orange: the environment appended it" },
};

const valueOf = (response, name, i) => {
  const values = response[name];
  if (name === "response_mask") return values ? Number(values[i]) : 1;
  if (!values) return null;
  return values.length === 1 && response.pieces.length > 1 ? values[0] : values[i];
};

/** Least, largest and 98th percentile of the sizes of a group's values. */
function scaleOf(group, name) {
  const found = [];
  for (const one of group.responses)
    for (let i = 0; i < one.pieces.length; i++) {
      const value = valueOf(one, name, i);
      if (value != null) found.push(value);
    }
  if (!found.length) return null;
  const sizes = found.map(Math.abs).sort((a, b) => a - b);
  const largest = sizes[Math.min(sizes.length - 1, Math.floor(0.98 * sizes.length))] || sizes.at(-1);
  return { low: Math.min(...bounds(found)), high: Math.max(...bounds(found)), largest };
}

/** Least and largest, of arrays too long for `Math.min(...)`. */
const bounds = (values) => values.reduce(([a, b], x) => [Math.min(a, x), Math.max(b, x)], [Infinity, -Infinity]);

function colorOf(name, value, scale) {
  if (value == null) return "";
  if (name === "response_mask") return value ? "rgba(0,114,178,.18)" : "rgba(213,94,0,.3)";
  if (COLORS[name].diverges) {
    const share = scale.largest ? Math.min(Math.abs(value) / scale.largest, 1) : 0;
    return share ? `rgba(${value < 0 ? "0,114,178" : "213,94,0"},${(0.06 + 0.6 * share).toFixed(3)})` : "";
  }
  const share = scale.high > scale.low ? (value - scale.low) / (scale.high - scale.low) : 0;
  return `rgba(0,114,178,${(0.05 + 0.55 * (name === "log_probs" ? 1 - share : share)).toFixed(3)})`;
}

function drawLegend(group) {
  const color = COLORS[state.color], scale = color && scaleOf(group, state.color);
  if (!color) return null;
  if (!scale) return el("p", { class: "soft" }, `No ${color.name}: ${group.responses.every((one) => one.advantage === 0) ? "A = 0, so the model was not computed for these answers" : "none was recorded"}.`);
  const box = el("span", { class: "ramp" });
  const values = color.diverges ? [-1, -0.5, 0, 0.5, 1].map((x) => x * scale.largest)
    : state.color === "response_mask" ? [1, 0] : [scale.low, scale.high];
  for (const value of values) {
    const label = state.color === "response_mask" ? (value ? "model" : "environment") : small(value);
    const patch = el("span", {}, label);
    patch.style.backgroundColor = colorOf(state.color, value, scale);
    box.append(patch);
  }
  const more = color.diverges ? `; 2 % of the tokens are beyond the last colour (\u00b1${small(Math.max(Math.abs(scale.low), Math.abs(scale.high)))})` : "";
  return el("p", { class: "legend soft" }, box, ` ${color.says}${more}. Hover a token for its numbers.`);
}

// --- the list of problems ------------------------------------------------------------------------

const parsed = new Map();
const load = (number) => {
  if (!parsed.has(number)) parsed.set(number, parse(`group-${number}`));
  return parsed.get(number);
};
const texts = new Map();
const textOf = (number) => {
  if (!texts.has(number)) {
    const group = load(number);
    const parts = [group.problem, group.prompt, group.answer];
    for (const one of group.responses) parts.push(one.pieces.join(""), one.reason);
    texts.set(number, parts.join("\n").toLowerCase());
  }
  return texts.get(number);
};

function chosen() {
  const query = state.q.toLowerCase(), found = [];
  groups.forEach((group, number) => {
    if (group.run !== Number(state.run)) return;
    if (state.step !== "" && group.step !== Number(state.step)) return;
    if (state.c !== "" && group.c !== Number(state.c)) return;
    if (state.verdict && !group.verdicts.includes(state.verdict)) return;
    if (query && !textOf(number).includes(query)) return;
    found.push(number);
  });
  const rate = (n) => (groups[n].k ? groups[n].c / groups[n].k : -1);
  const orders = {
    step: (a, b) => groups[b].step - groups[a].step || rate(a) - rate(b),
    rate: (a, b) => rate(a) - rate(b) || groups[b].step - groups[a].step,
    clipped: (a, b) => groups[b].clipped - groups[a].clipped || groups[b].step - groups[a].step,
  };
  return found.sort(orders[state.sort] || orders.step);
}

const MOST_ROWS = 200;
let shown = MOST_ROWS;

function select(label, name, options) {
  const choice = el("select", { id: `choose-${name}`, onchange: (event) => { shown = MOST_ROWS; set({ [name]: event.target.value }); } });
  for (const [value, text] of options) choice.append(el("option", { value, selected: state[name] === value }, text));
  return el("label", {}, `${label} `, choice);
}

function row(number) {
  const group = groups[number];
  const marks = el("span", { class: "marks", "aria-label": group.verdicts.join(", ") },
    ...group.verdicts.slice(0, 32).map((one) => el("i", { class: one })));
  return el("button", { class: "row", "data-key": keyOf(group), title: visible(group.problem), onclick: () => open(group) },
    el("span", { class: "rate" }, `${group.c}/${group.k}`), marks,
    el("span", { class: "soft" }, `step ${group.step}`), el("bdi", { class: "name" }, visible(group.problem)),
    group.clipped ? el("span", { class: "clipped" }, `${group.clipped} clipped`) : "");
}

function drawList() {
  const numbers = chosen(), list = document.getElementById("list");
  const of = groups.filter((group) => group.run === Number(state.run));
  const values = (name) => [...new Set(of.map((group) => group[name]))].sort((a, b) => a - b);
  const any = [["", "all"]];
  const filters = el("div", { class: "filters" },
    select("step", "step", any.concat(values("step").map((x) => [`${x}`, `${x}`]))),
    select("c", "c", any.concat(values("c").map((x) => [`${x}`, `${x}`]))),
    select("verdict", "verdict", any.concat(["correct", "wrong", "unknown"].map((x) => [x, x]))),
    select("sort", "sort", [["step", "newest step"], ["rate", "pass rate"], ["clipped", "most clipped"]]));
  const count = el("p", { class: "soft", id: "count" }, `${numbers.length} of ${of.length} problems by step`);
  list.replaceChildren(filters, count, ...numbers.slice(0, shown).map(row));
  if (numbers.length > shown)
    list.append(el("button", { class: "more", onclick: () => { shown += 4 * MOST_ROWS; drawList(); } }, `${numbers.length - shown} more`));
  const worth = (number) => groups[number].clipped || (groups[number].c && groups[number].c < groups[number].k ? 0.5 : 0);
  if (numbers.length && state.at === "") state.at = keyOf(groups[numbers.reduce((a, b) => (worth(b) > worth(a) ? b : a))]);
  markChosen();
}

function markChosen() {
  for (const one of document.querySelectorAll(".row"))
    one.setAttribute("aria-current", one.dataset.key === state.at && state.view === "group");
}

// --- a group: its answers side by side -----------------------------------------------------------

/** Where s lies between its bounds; the bound that can cut this response is drawn thicker. */
function gauge(one, reach) {
  const x = (value) => 50 + (48 * (value - 1)) / reach;
  const place = (value) => Math.min(Math.max(x(value), 1), 99);
  const parts = [];
  if (one.clip_low != null && one.clip_high != null) {
    const a = place(one.clip_low), b = place(one.clip_high);
    parts.push(el("rect", { class: "band", x: `${a}%`, y: "25%", width: `${b - a}%`, height: "50%" }));
    const cuts = one.advantage > 0 ? b : a;
    if (one.advantage) parts.push(el("line", { class: "bound", x1: `${cuts}%`, x2: `${cuts}%`, y1: "5%", y2: "95%" }));
  }
  parts.push(el("line", { class: "one", x1: "50%", x2: "50%", y1: "25%", y2: "75%" }));
  const at = `${place(one.ratio)}%`;
  parts.push(el("line", { class: one.clipped ? "s cut" : "s", x1: at, x2: at, y1: "0%", y2: "100%" }));
  return el("svg", { class: "gauge", role: "img", "aria-label": "s between its bounds" }, ...parts);
}

function facts(one, reach) {
  const found = [];
  if (one.advantage != null) found.push(el("span", {}, "A ", el("b", {}, one.advantage === 0 ? "0" : small(one.advantage))));
  if (one.update != null) {
    if (one.ratio != null) found.push(el("span", {}, "s ", el("b", {}, around(one.ratio))));
    if (one.clip_low != null && one.clip_high != null)
      found.push(el("span", { class: "soft" }, `clip ${around(one.clip_low)} .. ${around(one.clip_high)}`));
    if (one.clipped) found.push(el("span", { class: "cut" }, one.ratio != null ? `clipped (${one.clip_side})`
      : `${percent(one.clipped)} of tokens clipped (${one.clip_side})`));
    found.push(el("span", { class: "soft" }, `update ${one.update}`));
  } else if (one.advantage === 0) found.push(el("span", { class: "soft" }, "not computed: A = 0"));
  else if (one.advantage != null) found.push(el("span", { class: "soft" }, "not computed"));
  if (one.grade != null) found.push(el("span", { class: "soft" }, `grade ${small(one.grade)}`));
  found.push(el("span", { class: "soft" }, `${one.num_tokens} tokens${one.truncated ? ", truncated" : ""}`));
  const box = el("div", { class: "facts" }, ...found);
  if (one.ratio != null) box.append(gauge(one, reach));
  return box;
}

function timeline(spans, whole) {
  const bar = el("div", { class: "timeline" });
  const count = { turn: 0, call: 0 };
  for (const one of spans) {
    const kind = one.is_call ? "call" : "turn";
    const text = `${kind} ${++count[kind]}${one.failed ? ", failed" : ""}: ${(one.end_s - one.start_s).toFixed(2)} s, from `
      + `${one.start_s.toFixed(2)} to ${one.end_s.toFixed(2)} s, ${one.num_tokens} tokens`;
    const part = el("span", { class: `${kind}${one.failed ? " failed" : ""}`, title: text }, one.failed ? "\u00d7" : "");
    const width = Math.max((100 * (one.end_s - one.start_s)) / whole, 0.6);
    part.style.left = `${Math.min((100 * one.start_s) / whole, 100 - width)}%`;
    part.style.width = `${width}%`;
    bar.append(part);
  }
  return el("div", { class: "times soft" }, bar, `${Math.max(...spans.map((one) => one.end_s)).toFixed(2)} s`);
}

/** Places of the searched text within the pieces, as [begin, end) in characters. */
function hits(pieces) {
  const text = pieces.join("").toLowerCase(), query = state.q.toLowerCase(), found = [];
  for (let at = query ? text.indexOf(query) : -1; at >= 0 && found.length < 1000; at = text.indexOf(query, at + query.length))
    found.push([at, at + query.length]);
  return found;
}

/** The tokens of a response; where an environment takes part, in blocks by who wrote them. */
function tokens(one, number, scale) {
  const box = el("div", { class: "tokens" }), found = hits(one.pieces);
  const gap = one.pieces.length < one.num_tokens && one.ids ? one.pieces.length / 2 : -1;
  let block = box, written = null, count = 0, at = 0, next = 0;
  one.pieces.forEach((piece, i) => {
    if (one.response_mask && one.response_mask[i] !== written) {
      written = one.response_mask[i];
      block = el("div", { class: written ? "by-model" : "by-environment" });
      box.append(el("div", { class: "who" }, written ? `turn ${++count}` : "environment"), block);
    }
    if (i === gap) block.append(el("em", { class: "soft" }, ` [\u2026 ${one.num_tokens - one.pieces.length} tokens \u2026] `));
    const span = el("span", { "data-at": `${number}/${i}` }, visible(piece));
    const value = scale ? valueOf(one, state.color, i) : null;
    if (value != null) span.style.backgroundColor = colorOf(state.color, value, scale);
    const marks = [];
    if (piece === "") marks.push("void");
    if (piece.includes("\n")) marks.push("nl");
    if (one.token_clipped && one.token_clipped[i]) marks.push("token-cut");
    while (next < found.length && found[next][1] <= at) next++;
    if (next < found.length && found[next][0] < at + piece.length) marks.push("hit");
    if (marks.length) span.className = marks.join(" ");
    at += piece.length;
    block.append(span);
  });
  return box;
}

function card(one, number, scale, reach, whole) {
  return el("article", { class: one.verdict },
    el("h3", {}, `${one.sample}: `, el("strong", {}, one.verdict), one.reason ? el("bdi", { class: "reason" }, visible(one.reason)) : ""),
    one.metrics ? el("p", { class: "soft" }, Object.entries(one.metrics).map(([name, value]) => `${visible(name)} ${value}`).join(", ")) : "",
    facts(one, reach), one.spans ? timeline(one.spans, whole) : "", tokens(one, number, scale));
}

let current = null;

function drawGroup(main) {
  const number = groups.findIndex((group) => keyOf(group) === state.at);
  if (number < 0) return main.append(el("p", {}, "Choose a problem on the left."));
  const group = (current = load(number)), summary = groups[number];
  const scale = COLORS[state.color] ? scaleOf(group, state.color) : null;
  const away = group.responses.flatMap((one) => [one.ratio, one.clip_low, one.clip_high].filter((x) => x != null).map((x) => Math.abs(x - 1)));
  const whole = Math.max(...group.responses.flatMap((one) => (one.spans || []).map((span) => span.end_s)), 0) || 1;
  const same = groups.filter((other) => other.run === summary.run && other.problem === summary.problem).sort((a, b) => a.step - b.step);
  main.append(el("h2", {}, `Step ${group.step}, `, el("bdi", {}, visible(group.problem)), `: ${group.c} of ${group.k} correct`,
    group.source ? el("bdi", { class: "soft" }, ` ${visible(group.source)}`) : ""));
  if (group.responses.length < group.k) main.append(el("p", { class: "soft" }, `${group.responses.length} of its answers were kept.`));
  if (same.length > 1) main.append(el("p", { class: "over" }, "this problem over steps: ",
    ...same.map((other) => el("button", { "aria-current": String(other === summary), onclick: () => open(other) }, `step ${other.step}: ${other.c}/${other.k}`))));
  main.append(el("pre", { class: "prompt" }, visible(group.prompt)),
    el("p", { class: "soft" }, "reference: ", el("bdi", {}, visible(group.answer))));
  const legend = drawLegend(group);
  if (legend) main.append(legend);
  const reach = Math.max(...away, 1e-9) * 1.15;
  main.append(el("div", { class: "cards" }, ...group.responses.map((one, i) => card(one, i, scale, reach, whole))));
}

// --- the other views -----------------------------------------------------------------------------

function drawClip(main) {
  const run = head.runs[state.run];
  main.append(el("h2", {}, "The clip, by c"), el("p", { class: "soft" },
    `All computed responses of steps ${run.steps[0]} to ${run.steps.at(-1)}, from metrics.jsonl. The ratio of a response with A > 0 is clipped `
    + "above 1 + width, that of one with A < 0 below 1 \u2212 width. Size: the mean of |s \u2212 1|."));
  if (!run.clips.length) return main.append(el("p", {}, "No step is done yet."));
  const top = Math.max(...run.clips.flatMap((one) => [one.high || 0, one.low || 0]));
  const bar = (share, kind) => { const box = el("i", { class: `bar ${kind}` }); box.style.width = `${5 * share}rem`; return box; };
  const side = (one, width) => one == null ? [el("td", { colspan: 5, class: "soft" }, "none")] : [
    el("td", {}, width == null ? "" : bar(width / top, "width"), width == null ? "no bound" : small(width)),
    el("td", {}, `${one.sequences}`), el("td", {}, bar(one.clipped, "share"), percent(one.clipped)),
    el("td", {}, one.deviation.toExponential(1)), el("td", {}, one.moved.toExponential(1))];
  const names = ["width", "responses", "clipped", "mean s\u22121", "size"].map((text) => el("th", {}, text));
  main.append(el("table", { id: "clips" },
    el("thead", {}, el("tr", {}, el("th", {}), el("th", { colspan: 5 }, "A > 0"), el("th", { colspan: 5 }, "A < 0")),
      el("tr", {}, el("th", {}, "c"), ...names, ...names.map((one) => one.cloneNode(true)))),
    el("tbody", {}, ...run.clips.map((one) => el("tr", {}, el("th", {}, `${one.c}`), ...side(one.correct, one.high), ...side(one.wrong, one.low))))));
}

function drawUnknown(main) {
  const found = groups.filter((group) => group.run === Number(state.run) && group.unknown.length);
  const by = new Map();
  for (const group of found) for (const reason of group.unknown) by.set(reason, [...(by.get(reason) || []), group]);
  main.append(el("h2", {}, "Unknown verdicts"), el("p", { class: "soft" },
    "They are not wrong: the response leaves its group, and k is smaller. By reason, most frequent first."));
  if (!by.size) main.append(el("p", {}, "None among these samples."));
  for (const [reason, of] of [...by].sort((a, b) => b[1].length - a[1].length))
    main.append(el("section", {}, el("h3", {}, el("bdi", {}, visible(reason) || "no reason given"), ` (${of.length} problems)`),
      el("p", { class: "over" }, ...of.slice(0, 100).map((group) => el("button", { onclick: () => open(group) }, `step ${group.step}, ${visible(group.problem)}`)))));
}

function drawMain() {
  const main = document.getElementById("main");
  main.replaceChildren();
  document.getElementById("tip").hidden = true;
  ({ clip: drawClip, unknown: drawUnknown }[state.view] || drawGroup)(main);
  for (const one of document.querySelectorAll("#views button")) one.setAttribute("aria-current", one.id === `view-${state.view}`);
}

function drawTop() {
  const run = head.runs[state.run], top = document.getElementById("top");
  const unknown = groups.filter((group) => group.run === Number(state.run) && group.unknown.length).length;
  const view = (name, text) => el("button", { id: `view-${name}`, onclick: () => { set({ view: name }); markChosen(); } }, text);
  let waits;
  const search = el("input", { type: "search", id: "search", placeholder: "search the texts", value: state.q,
    oninput: (event) => { clearTimeout(waits); waits = setTimeout(() => { shown = MOST_ROWS; set({ q: event.target.value }); }, 250); } });
  const left = run.leftOut ? `, ${run.leftOut} others left out (--steps)` : "";
  const note = run.hasTokens ? "" : " Text only: this run has no tokens/ (an older run).";
  top.replaceChildren(el("h1", {}, document.title), el("p", { class: "soft" },
    `${run.method}, steps ${run.steps[0]} to ${run.steps.at(-1)}${left}.${note}${head.live ? " Live: new steps appear by themselves. " : " "}`,
    head.report ? el("a", { href: head.report }, "Report") : ""),
    el("div", { class: "controls" },
      head.runs.length > 1 ? select("run", "run", head.runs.map((one, i) => [`${i}`, one.name])) : "",
      el("span", { id: "views" }, view("group", "answers"), view("clip", "clip by c"), view("unknown", `unknown (${unknown})`)),
      run.hasTokens ? select("colour", "color", [["none", "none"], ...Object.entries(COLORS).map(([name, one]) => [name, one.name])]) : "",
      search));
  const choice = document.getElementById("choose-run");
  if (choice) choice.addEventListener("change", () => { state.at = ""; drawTop(); drawList(); drawMain(); });
}

// --- numbers of a token, and news -----------------------------------------------------------------

document.getElementById("main").addEventListener("mouseover", (event) => {
  const tip = document.getElementById("tip"), at = event.target.dataset && event.target.dataset.at;
  tip.hidden = !at;
  if (!at) return;
  const [number, i] = at.split("/").map(Number), one = current.responses[number];
  const middle = one.pieces.length / 2, cut = one.num_tokens - one.pieces.length;
  const lines = [`token ${cut > 0 && one.ids && i >= middle ? i + cut : i}${one.ids ? `, id ${one.ids[i]}` : ""}: ${JSON.stringify(one.pieces[i])}`];
  for (const [name, color] of Object.entries(COLORS)) {
    const value = valueOf(one, name, i);
    if (name === "response_mask") lines.push(value ? "sampled by the model" : "appended by the environment");
    else if (value != null) lines.push(`${color.name} ${name === "policy_versions" ? value : small(value)}`);
  }
  if (one.token_clipped) lines.push(one.token_clipped[i] ? "clipped" : "not clipped");
  if (one.update == null && one.ids) lines.push("no log-ratio: the model was not computed for it");
  tip.replaceChildren(...lines.map((line) => el("div", {}, visible(line))));
  const where = event.target.getBoundingClientRect();
  tip.style.left = `${Math.min(where.left, innerWidth - tip.offsetWidth - 16)}px`;
  tip.style.top = `${where.bottom + tip.offsetHeight + 8 < innerHeight ? where.bottom + 4 : Math.max(where.top - tip.offsetHeight - 4, 0)}px`;
});

if (head.live)
  setInterval(async () => {
    try {
      const newest = await fetch("newest");
      if (newest.ok && (await newest.text()) !== head.live) location.reload();
    } catch { /* the server has ended: the page stays as it is */ }
  }, 3000);

if (state.color === "" && head.runs[state.run].hasTokens) state.color = "log_ratio";
drawTop();
drawList();
drawMain();
