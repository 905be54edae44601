"use strict";
// Steps through a plan. The bars were drawn by step_drawing.py: bar number i of the plan is the
// element "plan-i", of the run "run-i". A moment is a time at which something begins or ends.

const facts = JSON.parse(document.getElementById("facts").textContent);
const bars = facts.bars;  // of the plan: {row, begin, end, name, text, after, takes, gives, same}
const moments = [...new Set(bars.flatMap((bar) => [bar.begin, bar.end]))].sort((a, b) => a - b);
const find = (id) => document.getElementById(id);
const elementOf = (number) => find(`plan-${number}`);
const short = (value) => String(Math.round(value * 1000) / 1000);

// --- Counts at a moment --------------------------------------------------------------------------

// What each row's count is at time t, and the most that it has been. What ends at a moment has given
// back before anything begins.
function countsAt(t) {
  const counts = facts.rows.map(() => ({ now: 0, most: 0 }));
  const changes = bars.flatMap((bar) => [
    { row: bar.row, at: bar.begin, by: bar.takes }, { row: bar.row, at: bar.end, by: -bar.gives }]);
  changes.sort((a, b) => a.at - b.at || a.by - b.by);
  for (const { row, at, by } of changes) {
    if (at > t) break;
    counts[row].now += by;
    counts[row].most = Math.max(counts[row].most, counts[row].now);
  }
  return counts;
}

// The share of the streams' time up to t in which nothing ran. A memory is no stream.
function idleAt(t) {
  if (t === 0) return 0;
  const busy = bars.filter((bar) => facts.rows[bar.row].works)
    .reduce((sum, bar) => sum + Math.max(0, Math.min(bar.end, t) - bar.begin), 0);
  return 1 - busy / (t * facts.rows.filter((row) => row.works).length);
}

// --- Show a moment -------------------------------------------------------------------------------

let place = 0;

const MOST_TOLD = 4;  // lanes that are told one by one

function sentence(t) {
  const running = bars.filter((bar) => bar.begin <= t && t < bar.end);
  const what = running.length <= MOST_TOLD
    ? running.map((bar) => `${facts.rows[bar.row].name}: ${bar.text}`)
    : [`${running.length} of ${facts.rows.length} lanes work`, ...running.slice(0, MOST_TOLD)
      .map((bar) => `${facts.rows[bar.row].name}: ${bar.name}`), "and so on"];
  return `At ${short(t)} of ${short(facts.end)} ${facts.unit} (moment ${place + 1} of ` +
    `${moments.length}): ${what.join("; ") || "all is done"}.`;
}

function showTable(t) {
  const cells = countsAt(t).map(({ now, most }, row) => {
    const formula = facts.rows[row].predicted_most;
    return `<tr><th scope="row"></th><td>${short(now)}</td><td>${short(most)}</td>` +
      `<td>${formula === null ? "" : short(formula)}</td></tr>`;
  });
  find("lanes").innerHTML = cells.join("");
  facts.rows.forEach((row, i) => { find("lanes").rows[i].cells[0].textContent = row.name; });
  find("idle").textContent = `${(100 * idleAt(t)).toFixed(1)} %`;
}

function showMoment() {
  const t = moments[place];
  for (const bar of document.querySelectorAll(".same")) bar.classList.remove("same");
  bars.forEach((bar, number) => {
    const running = bar.begin <= t && t < bar.end;
    elementOf(number).classList.toggle("future", bar.begin > t);
    elementOf(number).classList.toggle("running", running);
    for (const other of running ? bar.same : []) find(`run-${other}`).classList.add("same");
  });
  for (const end of ["x1", "x2"]) moment.setAttribute(end, `${(100 * t) / facts.end}%`);
  find("now").textContent = sentence(t);
  showTable(t);
}

function go(to) {
  place = Math.max(0, Math.min(moments.length - 1, to));
  showMoment();
  bringIntoSight(moments[place]);
}

// Brings a moment of the plan into sight, if it is not.
function bringIntoSight(t) {
  const seen = find("scroll");
  const at = find("stretched").offsetWidth * t / facts.end;
  const margin = seen.clientWidth / 10;
  if (at < seen.scrollLeft + margin || at > seen.scrollLeft + seen.clientWidth - margin) {
    seen.scrollLeft = at - seen.clientWidth / 2;
  }
}

function line(svg, className) {
  const drawn = document.createElementNS("http://www.w3.org/2000/svg", "line");
  drawn.setAttribute("class", className);
  svg.append(drawn);
  return drawn;
}

// --- Hover, and the same with the keyboard ---------------------------------------------------------

function middle(element) {
  const rect = element.querySelector("rect");
  return rect.y.baseVal.value + rect.height.baseVal.value / 2;
}

function forget() {
  for (const marked of document.querySelectorAll(".before, .chosen")) {
    marked.classList.remove("before", "chosen");
  }
  for (const arrow of document.querySelectorAll(".arrow")) arrow.remove();
}

function tell(element) {
  forget();
  element.classList.add("chosen");
  if (element.dataset.rank) showGroups(element.dataset.rank);
  const number = element.id.startsWith("plan-") ? Number(element.id.replace("plan-", "")) : NaN;
  const before = Number.isNaN(number) ? [] : bars[number].after;
  for (const other of before) {
    elementOf(other).classList.add("before");
    const arrow = line(element.ownerSVGElement, "arrow");
    const begin = Math.min(bars[other].end, bars[number].begin);  // a block goes on after its part
    arrow.setAttribute("x1", `${(100 * begin) / facts.end}%`);
    arrow.setAttribute("x2", `${(100 * bars[number].begin) / facts.end}%`);
    arrow.setAttribute("y1", middle(elementOf(other)));
    arrow.setAttribute("y2", middle(element));
  }
  const partOf = (other) => bars[other].begin === bars[number].begin ? "the begin of "  // a send
    : bars[other].end > bars[number].begin ? "a part of " : "";
  const after = before.map((other) => `${partOf(other)}${bars[other].text} on ` +
    facts.rows[bars[other].row].name);
  find("told").textContent = element.getAttribute("aria-label") +
    (after.length > 0 ? `. Comes after: ${after.join("; ")}.` : ".");
}

// Marks a rank's groups in all grids of the mesh.
function showGroups(rank) {
  for (const grid of document.querySelectorAll(".grid")) {
    const { group } = grid.querySelector(`[data-rank="${rank}"]`).dataset;
    for (const part of grid.querySelectorAll("[data-group]")) {
      part.classList.toggle("together", part.dataset.group === group);
    }
  }
}

// The bar that an arrow key leads to: the next one of the row, or, of the row above or below, the
// one that is nearest in time.
function neighbour(element, key) {
  const left = (bar) => bar.getBoundingClientRect().left;
  const sorted = (row) => [...row.querySelectorAll(".bar")].sort((a, b) => left(a) - left(b));
  const row = element.closest(".row");
  if (key === "ArrowLeft" || key === "ArrowRight") {
    const all = sorted(row);
    return all[all.indexOf(element) + (key === "ArrowRight" ? 1 : -1)];
  }
  let other = row;
  do {
    other = key === "ArrowUp" ? other.previousElementSibling : other.nextElementSibling;
  } while (other && !other.matches(".row"));
  if (!other) return undefined;
  const far = (bar) => Math.abs(left(bar) - left(element));
  return sorted(other).sort((a, b) => far(a) - far(b))[0];
}

function moveInDrawing(drawing, event) {
  if (event.key === "Escape") {
    drawing.blur();
    forget();
    return true;
  }
  if (!event.key.startsWith("Arrow")) return false;
  const chosen = drawing.querySelector(".chosen");
  const next = chosen ? neighbour(chosen, event.key) : drawing.querySelector(".row .bar");
  if (next) {
    tell(next);
    next.scrollIntoView({ block: "nearest", inline: "nearest" });
  }
  return true;
}

// --- Width, colours, keys ------------------------------------------------------------------------

let zoom = 1;

// Hides the names for which there is no room. All lengths are in the drawing's own pixels.
function fitNames() {
  for (const text of document.querySelectorAll(".bar text")) {
    text.classList.remove("long");
    const width = text.parentNode.querySelector("rect").width.baseVal.value;
    text.classList.toggle("long", width < text.getComputedTextLength() + 2);
  }
}

// Names of lanes stay in sight at the left, the unit in the middle.
function keepInSight() {
  const seen = find("scroll");
  const style = find("stretched").style;
  const hidden = find("stretched").offsetWidth - seen.clientWidth;
  style.setProperty("--left", `${seen.scrollLeft}px`);
  style.setProperty("--centre", `${seen.scrollLeft - hidden / 2}px`);
  style.setProperty("--visible", `${seen.clientWidth}px`);
}

function fit() {
  keepInSight();
  fitNames();
}

function stretch(factor) {
  zoom = Math.max(1, Math.min(64, zoom * factor));
  find("stretched").style.width = `${100 * zoom}%`;
  fit();
  bringIntoSight(moments[place]);
}

function changeTheme() {
  const root = document.documentElement;
  const dark = getComputedStyle(root).colorScheme === "dark";
  root.dataset.theme = dark ? "light" : "dark";
}

const actions = {
  first: [() => go(0), "Home"],
  back: [() => go(place - 1), "ArrowLeft"],
  forward: [() => go(place + 1), "ArrowRight"],
  last: [() => go(moments.length - 1), "End"],
  narrower: [() => stretch(0.5), "-"],
  wider: [() => stretch(2), "+"],
  theme: [changeTheme, "t"],
};

for (const [id, [action]] of Object.entries(actions)) find(id).addEventListener("click", action);
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.altKey || event.metaKey) return;
  const drawing = event.target.closest ? event.target.closest("#plan, #run, #mesh") : null;
  const found = Object.values(actions).find(([, key]) => key === event.key.replace("T", "t"));
  if (drawing && moveInDrawing(drawing, event)) event.preventDefault();
  else if (found) {
    found[0]();
    event.preventDefault();
  }
});
for (const bar of document.querySelectorAll(".row .bar")) {
  bar.addEventListener("pointerenter", () => tell(bar));
  bar.querySelector("title").remove();  // the page has a better place for it
}
// A click leaves the focus where it is: the arrows go on stepping.
for (const drawing of [find("plan"), find("run"), find("mesh")]) {
  drawing.addEventListener("mousedown", (event) => event.preventDefault());
}
const drawn = find("plan").querySelector("svg");
const moment = line(drawn, "moment");
moment.setAttribute("y1", 0);
moment.setAttribute("y2", drawn.getAttribute("height") - 30);
find("counted").textContent = facts.counted;
find("formula").textContent = facts.formula
  ? `at the end, by the formula: ${facts.formula.text} = ${(100 * facts.formula.value).toFixed(1)} %` : "";
// Columns in which nothing would stand.
const table = document.querySelector(".counts table");
table.dataset.most = bars.some((bar) => bar.gives > 0) ? "yes" : "no";
table.dataset.formula = facts.rows.some((row) => row.predicted_most !== null) ? "yes" : "no";
find("scroll").addEventListener("scroll", keepInSight);
window.addEventListener("resize", fit);
stretch(1);
go(0);
