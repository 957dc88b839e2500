// A group: its answers side by side, token by token.

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
  if (color.diverges && !scale.largest) return el("p", { class: "soft" }, `Every ${color.name} is 0${state.color === "log_ratio" ? ": update 0 of a step has the weights of the old log-probs" : ""}. Hover a token for its numbers.`);
  const box = el("span", { class: "ramp" });
  const values = color.diverges ? [-1, -0.5, 0, 0.5, 1].map((x) => x * scale.largest)
    : state.color === "response_mask" ? [1, 0] : [scale.low, scale.high];
  for (const value of values) {
    const label = state.color === "response_mask" ? (value ? "model" : "environment") : small(value);
    const patch = el("span", {}, label);
    patch.style.backgroundColor = colorOf(state.color, value, scale);
    box.append(patch);
  }
  const most = Math.max(Math.abs(scale.low), Math.abs(scale.high));
  const more = color.diverges && most > scale.largest ? `; 2 % of the tokens are beyond the last colour (\u00b1${small(most)})` : "";
  return el("p", { class: "legend soft" }, box, ` ${color.says}${more}. Hover a token for its numbers.`);
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

/** Number in the whole response of the i-th token on the page, which lacks the middle of long ones. */
const placeOf = (one, i) => {
  const lost = one.ids ? one.num_tokens - one.pieces.length : 0;
  return lost > 0 && i >= one.pieces.length / 2 ? i + lost : i;
};

/** The parts of a response (`_parts` of data.py) in the chosen order, each with its tokens on the page. */
function partsOf(one) {
  const parts = (one.parts || [{ begin: 0, end: one.num_tokens, conversation: 0 }]).map((part) => ({ ...part, shown: [] }));
  let at = 0;
  one.pieces.forEach((_, i) => {
    while (at < parts.length - 1 && placeOf(one, i) >= parts[at].end) at++;
    parts[at].shown.push(i);
  });
  return state.order === "time" ? parts : parts.sort((a, b) => a.conversation - b.conversation || a.begin - b.begin);
}

/** The tokens of a response; where an environment takes part, in blocks by conversation and by who wrote them. */
function tokens(one, number, scale) {
  const box = el("div", { class: "tokens" }), parts = partsOf(one);
  const found = hits(parts.flatMap((part) => part.shown.map((i) => one.pieces[i])));
  const lacks = one.ids && one.num_tokens > one.pieces.length;
  let block = box, conversation = one.conversations ? -1 : 0, lost = 0, at = 0, next = 0;
  const tell = () => { if (lost) block.append(el("em", { class: "soft" }, ` [\u2026 ${lost} tokens \u2026] `)); lost = 0; };
  for (const part of parts) {
    if (part.conversation !== conversation) {
      tell();
      conversation = part.conversation;
      box.append(el("div", { class: "conversation" }, `conversation ${conversation}`));
      block = box;
    }
    if (one.parts && part.shown.length) {
      tell();
      block = el("div", { class: part.turn ? "by-model" : "by-environment" });
      box.append(el("div", { class: "who" }, part.turn ? `turn ${part.turn}` : "environment"), block);
    }
    let expected = part.begin;
    for (const i of part.shown) {
      if (lacks) lost += placeOf(one, i) - expected;
      tell();
      expected = placeOf(one, i) + 1;
      const piece = one.pieces[i];
      while (next < found.length && found[next][1] <= at) next++;
      block.append(token(one, number, i, scale, next < found.length && found[next][0] < at + piece.length));
      at += piece.length;
    }
    if (lacks) lost += part.end - expected;
  }
  tell();
  return box;
}

function token(one, number, i, scale, isHit) {
  const piece = one.pieces[i], value = scale ? valueOf(one, state.color, i) : null, marks = [];
  const span = el("span", { "data-at": `${number}/${i}` }, visible(piece));
  if (value != null) span.style.backgroundColor = colorOf(state.color, value, scale);
  if (piece === "") marks.push("void");
  if (piece.includes("\n")) marks.push("nl");
  if (one.token_clipped && one.token_clipped[i]) marks.push("token-cut");
  if (isHit) marks.push("hit");
  if (marks.length) span.className = marks.join(" ");
  return span;
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

// --- numbers of a token, and news -----------------------------------------------------------------

document.getElementById("main").addEventListener("mouseover", (event) => {
  const tip = document.getElementById("tip"), at = event.target.dataset && event.target.dataset.at;
  tip.hidden = !at;
  if (!at) return;
  const [number, i] = at.split("/").map(Number), one = current.responses[number];
  const lines = [`token ${placeOf(one, i)}${one.ids ? `, id ${one.ids[i]}` : ""}: ${JSON.stringify(one.pieces[i])}`];
  for (const [name, color] of Object.entries(COLORS)) {
    const value = valueOf(one, name, i);
    if (name === "response_mask") lines.push(value ? "sampled by the model" : "appended by the environment");
    else if (value != null) lines.push(`${color.name} ${name === "policy_versions" ? value : small(value)}`);
  }
  if (one.conversations) lines.push(`conversation ${one.conversations[i]}`);
  if (one.token_clipped) lines.push(one.token_clipped[i] ? "clipped" : "not clipped");
  if (one.update == null && one.ids) lines.push("no log-ratio: the model was not computed for it");
  tip.replaceChildren(...lines.map((line) => el("div", {}, visible(line))));
  const where = event.target.getBoundingClientRect();
  tip.style.left = `${Math.min(where.left, innerWidth - tip.offsetWidth - 16)}px`;
  tip.style.top = `${where.bottom + tip.offsetHeight + 8 < innerHeight ? where.bottom + 4 : Math.max(where.top - tip.offsetHeight - 4, 0)}px`;
});
