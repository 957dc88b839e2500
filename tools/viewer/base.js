"use strict";
// Data, state and elements of the page of tools/view.py. What a model wrote is only ever set as text
// (`textContent`).

// --- elements and numbers ------------------------------------------------------------------------

const parse = (id) => JSON.parse(document.getElementById(id).textContent);
let head = parse("head");
let groups = head.groups;
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

const HIDDEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u2069\ufeff\ud800-\udfff\u{e0000}-\u{e007f}]/gu;

/** The text with signs for characters that would be unseen, or turn the line around. */
const visible = (text) =>
  text.replace(HIDDEN, (one) => `\u27e8U+${one.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}\u27e9`);

const small = (value) => (value === 0 ? "0" : Math.abs(value) < 1e-3 || Math.abs(value) >= 1e4
  ? value.toExponential(2) : Number(value.toPrecision(3)).toString());
const around = (value) => (value === 1 ? "1" : `1 ${value < 1 ? "\u2212" : "+"} ${small(Math.abs(value - 1))}`);
const percent = (share) => `${(100 * share).toFixed(1)} %`;

// --- state, in the address of the page -----------------------------------------------------------

const state = { run: "0", step: "", c: "", verdict: "", sort: "step", color: "", order: "", q: "", at: "", view: "group" };
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
