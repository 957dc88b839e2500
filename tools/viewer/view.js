// The list of problems, the other views, and the start of the page.

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
    for (const one of group.responses) {
      const within = (number) => one.pieces.filter((_, i) => !one.conversations || one.conversations[i] === number);
      parts.push(...[...new Set(one.conversations || [0])].map((number) => within(number).join("")), one.reason);
    }
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
  if (state.color === "" && run.hasTokens) state.color = "log_ratio";
  const unknown = groups.filter((group) => group.run === Number(state.run) && group.unknown.length).length;
  const view = (name, text) => el("button", { id: `view-${name}`, "aria-current": String(state.view === name), onclick: () => { set({ view: name }); markChosen(); } }, text);
  let waits;
  const search = el("input", { type: "search", id: "search", placeholder: "search the texts", value: state.q,
    oninput: (event) => { clearTimeout(waits); waits = setTimeout(() => { shown = MOST_ROWS; set({ q: event.target.value }); }, 250); } });
  const left = run.leftOut ? `, ${run.leftOut} others left out (--steps)` : "";
  const note = run.hasTokens ? "" : " Text only: no step has tokens/ yet.";
  top.replaceChildren(el("h1", {}, document.title), el("p", { class: "soft" },
    `${run.method}, steps ${run.steps[0]} to ${run.steps.at(-1)}${left}.${note}${head.live ? " Live: new steps appear by themselves. " : " "}`,
    el("b", { id: "news" }), " ",
    head.report ? el("a", { href: head.report }, "Report") : ""),
    el("div", { class: "controls" },
      head.runs.length > 1 ? select("run", "run", head.runs.map((one, i) => [`${i}`, one.name])) : "",
      el("span", { id: "views" }, view("group", "answers"), view("clip", "clip by c"), view("unknown", `unknown (${unknown})`)),
      run.hasTokens ? select("colour", "color", [["none", "none"], ...Object.entries(COLORS).map(([name, one]) => [name, one.name])]) : "",
      run.hasConversations ? select("order", "order", [["", "by conversation"], ["time", "in time"]]) : "",
      search));
  const choice = document.getElementById("choose-run");
  if (choice) choice.addEventListener("change", () => { state.at = ""; drawTop(); drawList(); drawMain(); });
}

// --- news, and the start --------------------

/** Take the data of a newer page; what the reader looks at stays where it is. */
function renew(text) {
  const page = new DOMParser().parseFromString(text, "text/html"), kind = "script[type='application/json']";
  for (const one of document.querySelectorAll(kind)) one.remove();
  for (const one of page.querySelectorAll(kind)) document.body.append(document.importNode(one, true));
  head = parse("head");
  groups = head.groups;
  parsed.clear();
  texts.clear();
  const list = document.getElementById("list"), top = list.scrollTop;
  const search = document.getElementById("search"), typed = search.value, isTyping = document.activeElement === search;
  if (!isRead) state.at = "";
  drawTop();
  drawList();
  list.scrollTop = top;
  Object.assign(document.getElementById("search"), { value: typed });
  if (isTyping) document.getElementById("search").focus();
  if (!isRead || state.view !== "group") drawMain();
}

/** Ask for news, and again 3 s after the answer. */
async function follow() {
  let news = "";
  try {
    const newest = await fetch("newest");
    if (newest.ok && (await newest.text()) !== head.live) {
      const page = await fetch(".");
      if (page.ok) renew(await page.text());
      else news = `Not renewed: ${await page.text()}`;
    }
  } catch { news = "The server has ended: nothing new will appear."; }
  document.getElementById("news").textContent = news;
  setTimeout(follow, 3000);
}

// Whoever has not touched the page sees the newest step; a reader's answers stay.
let isRead = state.at !== "";
for (const kind of ["pointerdown", "wheel", "keydown"]) addEventListener(kind, () => { isRead = true; }, { passive: true });

drawTop();
drawList();
drawMain();
if (head.live) setTimeout(follow, 3000);
