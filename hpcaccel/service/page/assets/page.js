/* What the pages need in the browser: the connection, the keyboard, links without a reload, the colours, ag-grid's cells. */
(function () {
  "use strict";
  const SECONDS = 3;
  const WAIT = 5000;
  const CALLBACK_WAIT = 30000; /* of those that the next tick repeats */
  const ONCE_WAIT = 120000; /* of others: longer than the service itself waits, so that its reason is shown */
  const prefix = window.hpcaccelPrefix || "/";
  const set = (id, props) => window.dash_clientside.set_props(id, props);
  const byId = (id) => document.getElementById(id);

  /* -- the connection: one small request every three seconds; pages refresh only after it was answered ------------ */
  let lostAt = null;
  let asking = false;

  function show(text) {
    const bar = byId("offline");
    if (!bar) return;
    bar.hidden = !text;
    if (bar.textContent !== text) bar.textContent = text;
  }

  async function beat() {
    if (asking || document.hidden) return;
    asking = true;
    try {
      const answer = await plainFetch(prefix + "_page/alive", { cache: "no-store", signal: AbortSignal.timeout(WAIT) });
      if (answer.status === 401) {
        lostAt = lostAt || new Date();
        show("The service was started again: open the new link that hpcaccel serve has printed");
      } else if (!answer.ok) {
        throw new Error(String(answer.status));
      } else {
        lostAt = null;
        show("");
        set("tick", { data: Date.now() });
      }
    } catch (_) {
      lostAt = lostAt || new Date();
      show("Not connected since " + lostAt.toLocaleTimeString([], { hour12: false }) + ". Trying again every 3 seconds");
    } finally {
      asking = false;
    }
  }

  /* A request of Dash that gets no answer must not block the next ones for ever. */
  const plainFetch = window.fetch.bind(window);
  window.fetch = function (input, options) {
    const address = typeof input === "string" ? input : input.url;
    if (address.includes("_dash-update-component") && !(options && options.signal)) {
      const repeated = /"changedPropIds":\["tick\.data"/.test((options && options.body) || "");
      options = Object.assign({}, options, { signal: AbortSignal.timeout(repeated ? CALLBACK_WAIT : ONCE_WAIT) });
    }
    return plainFetch(input, options);
  };
  setInterval(beat, SECONDS * 1000);
  document.addEventListener("visibilitychange", beat);
  window.addEventListener("online", beat);

  /* -- links: pages change without a reload ------------------------------------------------------------------------ */
  function open(path, search) {
    set("url", { pathname: path, search: search || "" });
  }
  document.addEventListener("click", (event) => {
    const link = event.target.closest && event.target.closest("a[href]");
    if (!link || event.defaultPrevented || event.button || event.metaKey || event.ctrlKey || event.shiftKey) return;
    const url = new URL(link.href, location.href);
    const ours = url.origin === location.origin && url.pathname.startsWith(prefix);
    if (!ours || link.target || link.hasAttribute("download") || url.pathname.startsWith(prefix + "api/")) return;
    event.preventDefault();
    open(url.pathname, url.search);
  });

  /* -- the keyboard ------------------------------------------------------------------------------------------------ */
  let before = "";
  const typing = (target) => target.closest("input:not([type=radio], [type=checkbox]), textarea, select, [contenteditable], .cm-editor");
  const TABLES = { "runs-grid": "run/", "sweeps-grid": "sweep/" };
  const shown = () => Object.keys(TABLES).find(byId);
  const grid = () => window.dash_ag_grid && shown() && window.dash_ag_grid.getApi(shown());

  function row(step) {
    const api = grid();
    if (!api || !api.getDisplayedRowCount()) return;
    const now = api.getFocusedCell();
    const last = api.getDisplayedRowCount() - 1;
    const index = now ? Math.min(last, Math.max(0, now.rowIndex + step)) : 0;
    api.ensureIndexVisible(index);
    api.setFocusedCell(index, "name");
  }
  function focused() {
    const api = grid();
    const cell = api && api.getFocusedCell();
    return cell ? api.getDisplayedRowAtIndex(cell.rowIndex) : null;
  }
  const KEYS = {
    "g r": () => open(prefix),
    "g s": () => open(prefix + "sweeps"),
    "g n": () => open(prefix + "submit"),
    "/": () => {
      const field = document.querySelector(".filter input, input.filter");
      if (field) { field.focus(); field.select(); }
    },
    "?": () => byId("show-keys").click(),
    d: () => byId("scheme").click(),
    j: () => row(1),
    k: () => row(-1),
    x: () => { const at = shown() === "runs-grid" && focused(); if (at) at.setSelected(!at.isSelected()); },
    Enter: () => { const at = focused(); if (at) open(prefix + TABLES[shown()] + encodeURIComponent(at.data.run_id)); },
  };
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (typing(event.target)) {
      if (event.key === "Escape") event.target.blur();
      return;
    }
    if (document.querySelector(".mantine-Modal-content")) return;
    if (event.key === "Enter" && event.target.closest("a, button")) return;
    const keys = before === "g" ? "g " + event.key : event.key;
    before = event.key === "g" && before !== "g" ? "g" : "";
    if (Object.hasOwn(KEYS, keys)) { event.preventDefault(); KEYS[keys](); }
  });

  /* -- a log stays at its end, unless it was scrolled away from there ---------------------------------------------- */
  document.addEventListener("scroll", (event) => {
    const log = event.target;
    if (log.id === "run-log") log.dataset.away = log.scrollTop + log.clientHeight < log.scrollHeight - 24 ? "yes" : "";
  }, true);
  new MutationObserver(() => {
    const log = byId("run-log");
    if (log && !log.dataset.away) log.scrollTop = log.scrollHeight;
  }).observe(document.body, { childList: true, subtree: true, characterData: true });

  /* -- callbacks in the browser ------------------------------------------------------------------------------------ */
  function paint(scheme) {
    window.hpcaccelScheme = scheme;
    document.documentElement.setAttribute("data-mantine-color-scheme", scheme);
    document.body.dataset.agThemeMode = scheme;
    return scheme;
  }
  window.dash_clientside = Object.assign({}, window.dash_clientside, {
    hpcaccel: {
      scheme: (clicked) => {
        if (!clicked) return paint(window.hpcaccelScheme);
        const scheme = window.hpcaccelScheme === "dark" ? "light" : "dark";
        try { localStorage.setItem("hpcaccel-scheme", scheme); } catch (_) { /* storage is switched off */ }
        return paint(scheme);
      },
      open: (clicked) => Boolean(clicked),
      columns: (fields, columns) => {
        const chosen = columns.map((one) => Object.assign({}, one, { hide: !(fields || []).includes(one.field) }));
        return chosen;
      },
      chosen: (rows) => {
        const found = (rows || []).map((one) => [one.run_id, one.name]);
        return [found, !found.length, found.length === 1 ? "1 run" : found.length + " runs"];
      },
    },
  });

  /* -- ag-grid ------------------------------------------------------------------------------------------------------ */
  const SORTS = { progress: "step" };
  const functions = (window.dashAgGridFunctions = window.dashAgGridFunctions || {});
  functions.hpcaccelKeep = () => 0; /* the service has sorted */
  functions.hpcaccelSorted = (params) => {
    const by = params.api.getColumnState().find((one) => one.sort);
    const field = by ? SORTS[by.colId] || by.colId : "created";
    set("runs-sort", { data: (by && by.sort === "asc" ? "" : "-") + field });
  };
  functions.hpcaccelOpenRow = (params) => open(prefix + "run/" + encodeURIComponent(params.data.run_id));

  const h = (...args) => window.React.createElement(...args);
  const cells = (window.dashAgGridComponentFunctions = window.dashAgGridComponentFunctions || {});
  cells.RunState = (props) => h("span", { className: "state s-" + props.value }, h("span", { className: "dot" }), props.value);
  cells.RunName = (props) => {
    const run = props.data;
    return h("a", { className: "run-name", href: prefix + "run/" + encodeURIComponent(run.run_id), title: run.run_id },
      h("span", null, run.name), h("small", null, run.run_id));
  };
  cells.RunProgress = (props) => {
    const { step, total, state } = props.data;
    if (step === null || step === undefined) return null;
    if (!total) return h("span", { className: "muted" }, "step " + step.toLocaleString());
    const share = Math.min(100, (100 * step) / total);
    return h("span", { className: "progress s-" + state, title: step.toLocaleString() + " of " + total.toLocaleString() },
      h("span", { className: "track" }, h("span", { style: { width: share + "%" } })),
      h("span", { className: "number" }, Math.floor(share) + "%"));
  };
  function ago(seconds) {
    const age = Math.max(0, Date.now() / 1000 - seconds);
    for (const [unit, size] of [["d", 86400], ["h", 3600], ["min", 60]]) if (age >= size) return Math.floor(age / size) + " " + unit + " ago";
    return "just now";
  }
  cells.RunTime = (props) => props.value
    ? h("time", { className: "muted", title: new Date(props.value * 1000).toLocaleString() }, ago(props.value)) : null;
})();
