// Draws the figures, again when the colour scheme changes, and sorts a table by the column clicked.
const specs = JSON.parse(document.getElementById("specs").textContent);
const dark = matchMedia("(prefers-color-scheme: dark)");

async function draw() {
  for (const element of document.querySelectorAll("[data-figure]")) {
    const spec = structuredClone(specs[element.dataset.figure]);
    const fitting = (pixels) => Math.max(1, Math.floor(element.clientWidth / pixels));
    spec.config.legend.columns = fitting(120);
    if (spec.facet) spec.columns = fitting(280);
    await window.vegaEmbed(element, spec, {
      actions: { export: true, source: false, compiled: false, editor: false },
      config: { background: "transparent" },
      renderer: "svg",
      theme: dark.matches ? "dark" : undefined,
    });
  }
}

document.addEventListener("click", ({ target }) => {
  const head = target.closest("th");
  if (!head) return;
  const body = head.closest("table").tBodies[0];
  const sign = (head.dataset.sign = head.dataset.sign === "1" ? -1 : 1);
  const text = (row) => row.cells[head.cellIndex].textContent;
  const order = new Intl.Collator("en", { numeric: true }).compare;
  const compare = (a, b) => parseFloat(a) - parseFloat(b) || order(a, b);
  body.append(...[...body.rows].sort((a, b) => sign * compare(text(a), text(b))));
});

dark.addEventListener("change", draw);
draw();
