// Draws the figures when they come into view, and filters, sorts and saves what is on the page.
const report = JSON.parse(document.getElementById("report").textContent);
const dark = matchMedia("(prefers-color-scheme: dark)");
const figures = new Map(); // element -> { view, page: its width }
const hidden = { norm: new Set(), size: new Set(), model: new Set(), data: new Set() };

function theme() {
  const style = getComputedStyle(document.documentElement);
  const [ink, faint, line] = ["--ink", "--faint", "--line"].map((v) => style.getPropertyValue(v));
  return { background: "transparent", text: { color: ink }, title: { color: ink, subtitleColor: faint },
    axis: { labelColor: ink, titleColor: ink, gridColor: line, domainColor: faint, tickColor: faint },
    legend: { labelColor: ink, titleColor: ink }, header: { labelColor: ink, titleColor: ink } };
}

function merged(base, extra) {
  const result = { ...base };
  for (const [key, value] of Object.entries(extra)) {
    const both = value && typeof value === "object" && base[key] && typeof base[key] === "object";
    result[key] = both ? merged(base[key], value) : value;
  }
  return result;
}

const NARROW = 560; // pixels of room for a figure
const WIDE_SQUARE = 70; // pixels; the least width of a square with an interval below its number
const columnsOf = ({ layer, datasets }) => new Set(datasets.rows.map((r) => r[layer[0].encoding.x.field])).size;

// The specification for the available width; `shrink`: pixels by which the last try was too wide.
// The title stands above the figure, where it can wrap.
function fitted(spec, room, shrink) {
  const copy = structuredClone(spec);
  const fit = copy.usermeta.fit;
  delete copy.title;
  copy.config = merged(copy.config, theme());
  fitLegends(copy, room);
  if (copy.hconcat) fitRow(copy, room - shrink);
  if (fit === "facet") {
    const panels = new Set(copy.datasets.rows.map((row) => row.norm)).size;
    copy.columns = Math.max(1, Math.min(panels, Math.floor(room / 270)));
    copy.spec.width = Math.max(130, Math.min(640, room / copy.columns - 80) - shrink / copy.columns);
  } else if (copy.spec?.width?.step) {
    const width = copy.spec.width.step * columnsOf({ ...copy.spec, datasets: copy.datasets }) + 80;
    copy.columns = Math.max(1, Math.min(3, Math.floor(room / width)));
  } else if (copy.width?.step) {
    copy.width.step = Math.max(20, Math.min(copy.width.step, (room - 100 - shrink) / columnsOf(spec)));
    if (copy.width.step < WIDE_SQUARE) narrowSquares(copy);
    if (room < NARROW) shortenTitles(copy);
  } else if (fit === "width" || fit === "strip") {
    const width = Math.max(120, Math.min(1400, room - 90) - shrink);
    copy.config.axis.titleLimit = width + 70;
    copy.config.axis.titleFontSize = width < 300 ? 10 : 12;
    for (const view of copy.vconcat ?? [copy]) {
      view.width = width;
      if (width < 300) shortenTitles(view);
    }
    if (shrink && width < 200) shrinkTexts(copy);
    for (const view of copy.vconcat ?? []) if (view.title) view.title = { text: view.title, fontSize: 12 };
  }
  return copy;
}

const viewsOf = ({ layer, hconcat, vconcat, spec }) => [...(layer ?? []), ...(hconcat ?? []), ...(vconcat ?? []), ...(spec ? [spec] : [])];

function fitLegends(view, room) {
  const columns = Math.max(1, Math.floor((room - 110) / 140)), legend = view.encoding?.color?.legend;
  if (view.config) view.config.legend.columns = columns;
  if (legend?.gradientLength) legend.gradientLength = Math.min(legend.gradientLength, room / 3);
  else if (legend) legend.columns = columns;
  viewsOf(view).forEach((part) => fitLegends(part, room));
}

// Panels beside each other widen with the room. On a narrow screen they stand in rows of two, or, where all share
// the names of the first, one below the other, each with the names.
function fitRow(copy, room) {
  const panels = copy.hconcat, [first] = panels.map((panel) => panel.layer ?? [panel]);
  const names = first.find(({ encoding }) => encoding.y?.type === "nominal")?.encoding.y;
  const total = panels.reduce((sum, panel) => sum + panel.width, 0);
  let scale = (room - (names ? 130 : 30) - (names ? 10 : 35) * panels.length) / total;
  if (room < NARROW) {
    Object.assign(copy, { concat: panels, columns: names ? 1 : 2 });
    delete copy.hconcat;
    scale = names ? (room - 130) / panels[0].width : 1;
    for (const { encoding } of panels.flatMap((panel) => panel.layer ?? [panel])) {
      if (names && encoding.y?.type === "nominal") encoding.y.axis = names.axis;
    }
  }
  for (const panel of panels) panel.width *= Math.max(1, Math.min(2, scale));
}

// `norm batch size (samples that share statistics)` is cut off on a narrow screen.
function shortenTitles({ encoding, layer = [] }) {
  if (encoding?.x?.title) encoding.x.title = encoding.x.title.replace(/(,| \().*$/, "");
  layer.forEach(shortenTitles);
}

// Long names at both sides leave no room for the lines between them.
function shrinkTexts(view) {
  if ((view.mark?.type ?? view.mark) === "text") Object.assign(view.mark, { fontSize: 7, dx: view.mark.dx && 14 });
  if (view.encoding?.y?.type === "nominal") Object.assign(view.encoding.y.axis ??= {}, { labelFontSize: 7 });
  viewsOf(view).forEach(shrinkTexts);
}

// Squares of a narrow screen have their number alone.
function narrowSquares(copy) {
  copy.layer = copy.layer.filter(({ encoding }) => encoding.text?.field !== "under");
  for (const { mark, encoding } of copy.layer) {
    if (encoding.text) Object.assign(mark, { dy: 0, fontSize: copy.width.step < 34 ? 9 : 11 });
  }
}

// Draws the specification at a width at which it fits; resolves to its view.
async function embed(element, spec, room) {
  const options = { actions: false, renderer: "svg", tooltip: { theme: dark.matches ? "dark" : "light" } };
  for (let shrink = 0, tries = 0; ; tries += 1) {
    const result = await window.vegaEmbed(element.firstElementChild, fitted(spec, room, shrink), options);
    const excess = (element.querySelector("svg.marks")?.getBoundingClientRect().width ?? 0) - room;
    if (excess <= 0 || tries === 2) return result.view;
    shrink += excess + 2;
    result.finalize();
  }
}

async function draw(element) {
  const spec = report.figures[element.dataset.figure];
  const isWide = spec.width?.step && columnsOf(spec) * WIDE_SQUARE + 100 > element.clientWidth;
  element.closest("figure").classList.toggle("wide", Boolean(isWide));
  element.closest("figure").classList.add("drawn");
  const room = element.clientWidth;
  if (!room) return;
  figures.get(element)?.view?.finalize();
  const view = await embed(element, spec, room);
  figures.set(element, { view, page: innerWidth });
  await filterView(view);
  element.dataset.ready = "yes";
}

async function filterView(view) {
  view.signal("hidden_norms", [...hidden.norm]).signal("hidden_sizes", [...hidden.size]);
  await view.runAsync();
}

function filterPage() {
  for (const row of document.querySelectorAll("[data-norm], [data-model]")) {
    row.hidden = Object.entries(hidden).some(([key, values]) => values.has(row.dataset[key]));
    if (row.nextElementSibling?.querySelector(":scope > .opened")) row.nextElementSibling.hidden = row.hidden;
  }
  for (const sentence of document.querySelectorAll("[data-norms]")) {
    const norms = JSON.parse(sentence.dataset.norms), gone = norms.filter((n) => hidden.norm.has(n));
    const sizes = JSON.parse(sentence.dataset.sizes).some((size) => hidden.size.has(`${size}`));
    const isPlural = sentence.classList.contains("independent"); // true of each norm in it
    sentence.classList.toggle("stale", sizes || gone.length > (isPlural ? norms.length - 1 : 0));
  }
  const count = Object.values(hidden).reduce((sum, values) => sum + values.size, 0);
  document.querySelector(".filters summary").textContent = count ? `Filters: ${count} hidden` : "Filters";
  for (const { view } of figures.values()) if (view) filterView(view);
}

// A table that does not fit becomes a list of cards.
function fitTables() {
  for (const table of document.querySelectorAll(".scroll > table")) {
    table.classList.remove("cards");
    table.classList.toggle("cards", table.scrollWidth > table.parentElement.clientWidth);
  }
}

const element = (tag, text, ...children) => {
  const made = document.createElement(tag);
  if (text !== null) made.textContent = text;
  made.append(...children);
  return made;
};

// A row of the cells' table opens what is known of the cell, and closes it again.
function toggleCell(button) {
  const row = button.closest("tr");
  const isOpen = button.getAttribute("aria-expanded") === "true";
  button.setAttribute("aria-expanded", !isOpen);
  if (isOpen) return void row.nextElementSibling.remove();
  const cell = report.cells[button.dataset.cell];
  const place = element("td", null, ...cellParts(cell));
  place.colSpan = row.cells.length;
  place.className = "opened";
  row.after(element("tr", null, place));
  fitTables();
  for (const chart of place.querySelectorAll(".chart")) drawSeeds(chart, cell.curves[chart.dataset.label]);
}

function cellParts(cell) {
  const texts = (cells, tag) => cells.map((text, i) => {
    const made = element(tag, text);
    made.dataset.name = cell.columns[i];
    return made;
  });
  const lines = (values) => Object.entries(values).map(([key, value]) => `${key}: ${value}`).join("\n");
  const charts = Object.keys(cell.curves).map((label) => {
    const chart = element("div", null, element("div", null));
    [chart.className, chart.dataset.label] = ["chart", label];
    const figure = element("figure", null, element("h3", `${label} by seed`), chart);
    figure.className = "drawn";
    return figure;
  });
  const figures = element("div", null, ...charts);
  figures.className = "figures";
  const runs = element("table", null,
    element("thead", null, element("tr", null, ...texts(cell.columns, "th"))),
    element("tbody", null, ...cell.runs.map((run) => element("tr", null, ...texts(run, "td")))));
  const scroll = element("div", null, runs);
  scroll.className = "scroll";
  const folded = ["config", "environment"].map((name) =>
    element("details", null, element("summary", name), element("pre", lines(cell[name]))));
  const again = cell.command ? [element("h3", "The command for this cell"), element("pre", cell.command)] : [];
  return [element("p", cell.directory), ...again, element("h3", "Runs"), scroll, figures, ...folded];
}

function drawSeeds(chart, rows) {
  const spec = structuredClone(report.seeds);
  spec.datasets = { rows };
  spec.encoding.y.title = chart.dataset.label;
  const values = rows.map((row) => row.value).sort((a, b) => a - b);
  const isWild = values.at(-1) > 20 * values[values.length >> 1] && values[0] > 0; // one has diverged
  if (isWild) Object.assign(spec.encoding.y, { scale: { type: "log" }, axis: { format: ".0e", tickCount: 6 } });
  embed(chart, spec, chart.clientWidth);
}

function save(name, url) {
  const link = document.createElement("a");
  [link.href, link.download] = [url, name];
  link.click();
}

function saveCsv(name, text) {
  const url = URL.createObjectURL(new Blob([text], { type: "text/csv" }));
  save(`${name}.csv`, url);
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}

async function saveImage(chart, kind) {
  const { view } = figures.get(chart) ?? {};
  if (view) save(`${chart.dataset.figure}.${kind}`, await view.toImageURL(kind, 2));
}

function sortBy(header) {
  const table = header.closest("table");
  table.querySelectorAll(":scope > tbody > tr > .opened").forEach((one) => one.parentNode.remove());
  table.querySelectorAll("[aria-expanded]").forEach((one) => one.setAttribute("aria-expanded", "false"));
  const column = [...header.parentNode.children].indexOf(header);
  const down = header.getAttribute("aria-sort") === "ascending";
  for (const other of header.parentNode.children) other.removeAttribute("aria-sort");
  header.setAttribute("aria-sort", down ? "descending" : "ascending");
  const key = (row) => {
    const text = row.children[column].textContent;
    const number = Number.parseFloat(text);
    return Number.isNaN(number) ? text : number;
  };
  const compare = (a, b) => typeof a === typeof b
    ? (a < b ? -1 : a > b ? 1 : 0) : (typeof a === "number" ? -1 : 1);
  const rows = [...table.tBodies[0].rows].map((row) => [key(row), row]);
  rows.sort((a, b) => (down ? -1 : 1) * compare(a[0], b[0]));
  table.tBodies[0].append(...rows.map(([, row]) => row));
}

// The address holds what is hidden, as in #norm=batch&size=2, so that a view can be sent.
const boxes = [...document.querySelectorAll("[data-filter]")];
function readAddress() {
  const wanted = new URLSearchParams(location.hash.slice(1));
  for (const box of boxes) {
    const { filter, value } = box.dataset;
    box.checked = !wanted.getAll(filter).includes(value);
    hidden[filter][box.checked ? "delete" : "add"](value);
  }
  if (boxes.length) filterPage();
}

function writeAddress() {
  const pairs = Object.entries(hidden).flatMap(([key, values]) => [...values].map((value) => [key, value]));
  const hash = pairs.length ? `#${new URLSearchParams(pairs)}` : "";
  history.replaceState(null, "", location.pathname + location.search + hash);
}

document.addEventListener("change", (event) => {
  const { filter, value } = event.target.dataset;
  if (!filter) return;
  hidden[filter][event.target.checked ? "delete" : "add"](value);
  writeAddress();
  filterPage();
});
addEventListener("hashchange", readAddress);
document.addEventListener("click", (event) => {
  const button = event.target.closest("button");
  const { table, image, cell } = button?.dataset ?? {};
  if (cell) toggleCell(button);
  else if (table) saveCsv(table, report.tables[table]);
  else if (image) saveImage(button.closest("figure").querySelector(".chart"), image);
  else if (button?.closest("th")) sortBy(button.closest("th"));
});

const seen = new IntersectionObserver((entries) => {
  for (const { isIntersecting, target } of entries) {
    if (isIntersecting && !figures.has(target)) {
      figures.set(target, {});
      draw(target);
    }
  }
}, { rootMargin: "600px" });
const charts = document.querySelectorAll(".chart");
charts.forEach((chart) => seen.observe(chart));
fitTables();
readAddress();
const redraw = (wanted) => charts.forEach((c) => figures.get(c)?.view && wanted(c) && draw(c));
dark.addEventListener("change", () => redraw(() => true));
let waiting;
addEventListener("resize", () => {
  clearTimeout(waiting);
  waiting = setTimeout(() => fitTables() ?? redraw((c) => figures.get(c).page !== innerWidth), 200);
});
