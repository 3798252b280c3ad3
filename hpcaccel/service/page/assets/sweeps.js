/* Cells of the tables of sweeps and trials, and the line numbers beside the YAML. */
(function () {
  "use strict";
  const prefix = window.hpcaccelPrefix || "/";
  const h = (...args) => window.React.createElement(...args);
  const cells = (window.dashAgGridComponentFunctions = window.dashAgGridComponentFunctions || {});
  const functions = (window.dashAgGridFunctions = window.dashAgGridFunctions || {});
  const STATES = ["complete", "running", "pruned", "failed"];

  cells.SweepName = (props) =>
    h("a", { className: "run-name", href: prefix + "sweep/" + encodeURIComponent(props.data.run_id), title: props.data.run_id },
      h("span", null, props.data.name), h("small", null, props.data.run_id));
  cells.SweepTrials = (props) => {
    const { trials, total } = props.data;
    if (!trials) return null;
    const begun = Object.values(trials).reduce((sum, count) => sum + count, 0);
    const all = Math.max(total || begun, begun, 1);
    const text = STATES.filter((one) => trials[one]).map((one) => trials[one] + " " + one).join(", ");
    return h("span", { className: "sweep-trials", title: text },
      h("span", { className: "sweep-parts" }, STATES.map((one) => trials[one]
        ? h("span", { key: one, className: "t-" + one, style: { width: (100 * trials[one]) / all + "%" } }) : null)),
      h("span", { className: "number muted" }, total ? begun + " / " + total : String(begun)));
  };
  functions.hpcaccelNumber = (params) => {
    const value = params.value;
    if (value === null || value === undefined) return "";
    if (typeof value !== "number") return String(value);
    return Number.isInteger(value) ? value.toLocaleString("en") : String(Number(value.toPrecision(5)));
  };
  functions.hpcaccelOpenSweep = (params) =>
    window.dash_clientside.set_props("url", { pathname: prefix + "sweep/" + encodeURIComponent(params.data.run_id), search: "" });

  /* -- line numbers ------------------------------------------------------------------------------------------------ */
  let wrong = new Map();
  function paint(text) {
    const gutter = document.getElementById("submit-gutter");
    if (!gutter) return;
    const count = text.split("\n").length;
    const lines = [];
    for (let line = 1; line <= count; line++) {
      const one = document.createElement("div");
      one.textContent = line;
      if (wrong.has(line)) { one.className = "is-wrong"; one.title = wrong.get(line); }
      lines.push(one);
    }
    gutter.replaceChildren(...lines);
  }
  document.addEventListener("input", (event) => {
    if (event.target.id === "submit-yaml") paint(event.target.value);
  });
  /* Enter keeps the indentation, and adds to it after a colon. */
  document.addEventListener("keydown", (event) => {
    const area = event.target;
    if (area.id !== "submit-yaml" || event.key !== "Enter" || event.ctrlKey || event.metaKey || event.isComposing) return;
    const before = area.value.slice(0, area.selectionStart).split("\n").pop();
    const indent = before.match(/^ */)[0] + (/:\s*$/.test(before) ? "  " : "");
    if (!indent) return;
    event.preventDefault();
    document.execCommand("insertText", false, "\n" + indent);
  });
  window.dash_clientside = Object.assign({}, window.dash_clientside, {
    hpcaccelSubmit: {
      gutter: (problems, text) => {
        wrong = new Map((problems || []).map((one) => [one.line, one.message]));
        const area = document.getElementById("submit-yaml");
        // The text area may get a new text later than this; while it is typed in, it is ahead of the callback.
        paint(area && document.activeElement === area ? area.value : text || "");
        return "";
      },
    },
  });
})();
