"use strict";
/* One moving chart: uPlot in the place of the still picture, with a zoom that mouse, fingers and keys
   can all do, and its numbers in words. `charts.js` says which figures get one. */

fcil.chart = (() => {
  const HINT = "Left and right arrow keys read the values, plus and minus zoom, Escape shows all.";
  const SHORT = 8; // so few places need no zoom
  const LASTS = [50, 200];
  const DOTS = 40; // more points than this in view are drawn without their dots
  const colour = fcil.draw.colour;

  /** How many places the x axis has; for "xy" it is measured in its unit instead. */
  const places = (spec) => (spec.kind === "xy" ? 0 : Math.max(...spec.series.map((s) => s.values.length), 0));

  /** The table that uPlot draws: x, then a column for each series. */
  function columns(spec) {
    if (spec.kind === "xy") {
      const tables = spec.series.map((s) => {
        const sorted = [...s.points].sort((p, q) => p[0] - q[0]);
        return [sorted.map((p) => p[0]), sorted.map((p) => p[1])];
      });
      return uPlot.join(tables);
    }
    return [Array.from({ length: places(spec) }, (_, i) => i), ...spec.series.map((s) => s.values)];
  }

  /** The widest view there is, as [from, to] on the x axis. */
  function whole(spec) {
    if (spec.kind === "xy") return fcil.draw.around(spec.series.flatMap((s) => s.points.map((p) => p[0])));
    const last = Math.max(places(spec) - 1, 0);
    return spec.kind === "bars" || last === 0 ? [-0.5, last + 0.5] : [-last * 0.02, last * 1.02];
  }

  /** What stands at a place, in words: "task 1, round 3: up 3.2 MB (updates 3 MB, …)". */
  function words(spec, table, index) {
    const say = (number) => fcil.format.value(number, spec.y.unit);
    if (spec.kind === "xy") {
      const found = spec.series
        .map((s, i) => [s.name, table[i + 1][index]])
        .filter(([, y]) => y !== null && y !== undefined)
        .map(([name, y]) => `${name} ${say(y)}`);
      return `${fcil.format.value(table[0][index], spec.x.unit)} ${spec.x.title}: ${found.join(", ")}`;
    }
    const name = spec.x.names?.[index] ?? `${spec.x.title} ${spec.x.labels?.[index] ?? index}`;
    const found = [];
    for (const [stack, pieces] of fcil.draw.stacks(spec)) {
      const parts = pieces.filter((s) => s.values[index]).map((s) => `${s.name} ${say(s.values[index])}`);
      const sum = `${stack} ${say(fcil.draw.total(pieces, index))}`;
      found.push(parts.length ? `${sum} (${parts.join(", ")})` : sum);
    }
    for (const line of spec.series.filter((s) => spec.kind !== "bars" || !s.stack)) {
      found.push(`${line.name} ${say(line.values[index])}`);
    }
    return `${name}: ${found.join("; ")}`;
  }

  /** uPlot's description of a chart. `state.spec` may change later, as long as its shape stays. */
  function options(state, size) {
    const { spec } = state;
    const axis = { stroke: () => colour("faint"), font: "12px system-ui, sans-serif",
      grid: { stroke: () => colour("line"), width: 1 }, ticks: { stroke: () => colour("line"), width: 1 } };
    const narrow = size.width < 480;
    return {
      ...size,
      legend: { show: false },
      padding: [() => (state.spec.marks?.length ? 20 : 10), spec.kind === "xy" ? 30 : 12, 0, 0],
      cursor: { y: false, drag: { x: true, y: false, setScale: false }, points: { show: spec.kind !== "bars" } },
      scales: {
        x: { time: false, auto: false, range: (_, min, max) => [min, max] },
        y: { range: () => fcil.draw.ends(state.spec, ...state.window) },
      },
      axes: [
        { ...axis, label: spec.x.title, labelSize: 20, labelFont: axis.font, size: 30, space: spec.kind === "xy" ? 72 : narrow ? 44 : 56,
          grid: spec.kind === "bars" ? { show: false } : axis.grid,
          incrs: spec.kind === "xy" ? undefined : [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000],
          values: (_, splits) => splits.map((v) => xLabel(state.spec, v)) },
        { ...axis, size: narrow ? 56 : 66, space: 36,
          values: (_, splits) => splits.map((v) => fcil.format.tick(v, state.spec.y.unit)) },
      ],
      series: [{}, ...spec.series.map((s) => line(spec, s))],
      hooks: {
        drawAxes: [(u) => fcil.draw.bars(u, state.spec)],
        draw: [(u) => fcil.draw.annotations(u, state.spec)],
        setSelect: [(u) => selected(state, u)],
        setCursor: [(u) => read(state, u)],
      },
    };
  }

  function xLabel(spec, value) {
    if (spec.kind === "xy") return fcil.format.tick(value, spec.x.unit);
    return Number.isInteger(value) && value >= 0 && value < places(spec)
      ? spec.x.labels?.[value] ?? String(value) : "";
  }

  function line(spec, series) {
    if (spec.kind === "bars" && series.stack) return { paths: () => null, points: { show: false } };
    const stroke = () => colour(series.style);
    return {
      stroke, width: 2, dash: fcil.draw.DASHES[series.style],
      cap: series.style === "b" ? "round" : "butt", spanGaps: spec.kind === "xy",
      points: { show: (_u, _s, from, to) => to - from <= DOTS, size: 8, stroke, fill: stroke },
    };
  }

  /** Put a view into effect: all, the last so many places, or from here to there. */
  function show(state, view) {
    const all = whole(state.spec);
    const half = state.spec.kind === "bars" ? 0.5 : 0;
    let [min, max] = all;
    if (view?.last && places(state.spec) > view.last) {
      max = places(state.spec) - 1 + half;
      min = places(state.spec) - view.last - half;
    } else if (view && !view.last) {
      const wide = Math.min(view.max - view.min, all[1] - all[0]);
      min = Math.min(Math.max(view.min, all[0]), all[1] - wide);
      max = min + wide;
    } else {
      view = view?.last ? view : null;
    }
    state.view = view;
    state.window = [min, max]; // uPlot asks for the other axis before it has taken this one over
    state.u.setScale("x", { min, max });
    for (const [button, is] of state.buttons) button.setAttribute("aria-pressed", String(is(view)));
  }

  function zoom(state, factor) {
    const { min, max } = state.u.scales.x;
    const all = whole(state.spec);
    const least = state.spec.kind === "xy" ? (all[1] - all[0]) / 100 : 2;
    const index = state.u.cursor.idx;
    const at = state.reading && index !== null && index !== undefined ? state.u.data[0][index] : (min + max) / 2;
    const wide = Math.max((max - min) * factor, least);
    if (wide >= all[1] - all[0]) return show(state, null);
    const from = at - (wide * (at - min)) / (max - min);
    return show(state, { min: from, max: from + wide });
  }

  /** What was dragged over becomes the view. */
  function selected(state, u) {
    if (u.select.width < 8) return;
    let min = u.posToVal(u.select.left, "x");
    let max = u.posToVal(u.select.left + u.select.width, "x");
    if (state.spec.kind === "bars") [min, max] = [Math.round(min) - 0.5, Math.round(max) + 0.5];
    u.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
    show(state, { min, max });
  }

  /** Write what stands under the cursor; for ears only if a key moved it. */
  function read(state, u) {
    const { idx } = u.cursor;
    const there = idx !== null && idx !== undefined && u.cursor.left >= 0;
    const text = there ? words(state.spec, u.data, idx) : "";
    if (state.says.textContent !== text) state.says.textContent = text;
    if (state.byKey) state.loud.textContent = text;
  }

  /** Move the cursor to a place, and the view with it. */
  function step(state, by) {
    const { u } = state;
    const last = u.data[0].length - 1;
    if (last < 0) return;
    const now = state.reading ? u.cursor.idx : null;
    const from = now ?? (by > 0 ? -1 : last + 1);
    const index = Math.min(Math.max(from + by, 0), last);
    const at = u.data[0][index];
    const { min, max } = u.scales.x;
    if (at < min || at > max) {
      const shift = at < min ? at - min - (max - min) / 4 : at - max + (max - min) / 4;
      show(state, { min: min + shift, max: max + shift });
    }
    state.reading = true;
    state.byKey = true;
    // uPlot moves its cursor after a change of scale has been drawn, hence not at once.
    queueMicrotask(() => {
      u.setCursor({ left: u.valToPos(at, "x"), top: u.over.clientHeight / 2 });
      state.byKey = false;
    });
  }

  const KEYS = {
    ArrowLeft: (state) => step(state, -1),
    ArrowRight: (state) => step(state, 1),
    Home: (state) => step(state, -Infinity),
    End: (state) => step(state, Infinity),
    "+": (state) => zoom(state, 0.5),
    "=": (state) => zoom(state, 0.5),
    "-": (state) => zoom(state, 2),
    Escape: (state) => show(state, null),
  };

  function listen(state) {
    const { box } = state;
    box.addEventListener("keydown", (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey || !Object.hasOwn(KEYS, event.key)) return;
      if (event.key === "Escape" && !state.view) return; // leaves it to the dialog around
      event.preventDefault();
      event.stopPropagation();
      KEYS[event.key](state);
    });
    box.addEventListener("pointermove", () => { state.reading = true; });
    box.addEventListener("dblclick", () => show(state, null));
    // A tap: what a browser makes of it for mice, uPlot takes for a stray event.
    state.u.over.addEventListener("click", (event) => {
      const { left, top } = state.u.over.getBoundingClientRect();
      state.reading = true;
      state.u.setCursor({ left: event.clientX - left, top: event.clientY - top });
    });
    // A finger moves the view sideways; up and down it scrolls the page (touch-action in the style).
    let finger = null;
    box.addEventListener("pointerdown", (event) => {
      if (event.pointerType === "touch" && state.view) {
        finger = { x: event.clientX, min: state.u.scales.x.min, max: state.u.scales.x.max };
      }
    });
    box.addEventListener("pointermove", (event) => {
      if (!finger || event.pointerType !== "touch") return;
      const by = ((finger.x - event.clientX) * (finger.max - finger.min)) / state.u.over.clientWidth;
      show(state, { min: finger.min + by, max: finger.max + by });
    });
    for (const end of ["pointerup", "pointercancel"]) box.addEventListener(end, () => { finger = null; });
  }

  function button(state, text, title, act, is) {
    const made = fcil.make("button", { type: "button", text, title });
    made.addEventListener("click", () => act());
    if (is) state.buttons.set(made, is);
    return made;
  }

  function tools(state) {
    const count = places(state.spec);
    const row = fcil.make("div", { class: "chart-tools", role: "group", "aria-label": `Zoom: ${state.spec.title}` });
    if (state.spec.kind !== "xy" && count < SHORT) return row;
    row.append(button(state, "All", "Show all", () => show(state, null), (view) => view === null));
    for (const last of LASTS.filter((n) => n < count)) {
      row.append(button(state, `Last ${last}`, `Show the last ${last} and follow`,
        () => show(state, { last }), (view) => view?.last === last));
    }
    row.append(button(state, "+", "Zoom in", () => zoom(state, 0.5)), button(state, "−", "Zoom out", () => zoom(state, 2)));
    return row;
  }

  const size = (box) => ({ width: Math.floor(box.clientWidth), height: 240 });

  /** What may not change while a chart is kept: its lines, axes and buttons. */
  const shape = (spec) => JSON.stringify([spec.kind, spec.title, spec.x.title, spec.y.unit,
    spec.series.map((s) => [s.name, s.style, s.stack]), SHORT <= places(spec), LASTS.map((n) => n < places(spec))]);

  /** Make a chart in a `.plot`; it fills the width that it finds.

      Returns what `charts.js` needs: update(spec) (false: make another one), resize, recolour, destroy,
      and the view, which the next one can start from. */
  function make(plot, spec, view) {
    const box = fcil.make("div", { class: "chart-box", tabindex: "0", role: "application",
      "aria-roledescription": "chart", "aria-label": `${spec.title}. ${HINT}` });
    const state = { spec, view: null, window: whole(spec), reading: false, byKey: false, box, buttons: new Map(),
      says: fcil.make("p", { class: "chart-says", "aria-hidden": "true" }),
      loud: fcil.make("p", { class: "unseen", "aria-live": "polite" }) };
    const mount = fcil.make("div", { class: "live-plot" });
    mount.append(tools(state), box, state.says, state.loud);
    plot.append(mount);
    try {
      state.u = new uPlot(options(state, size(box)), columns(spec), box);
      show(state, view ?? null);
      listen(state);
    } catch (error) {
      mount.remove(); // the still picture stays
      throw error;
    }
    const kept = shape(spec);
    return {
      update(next) {
        if (shape(next) !== kept) return false;
        state.spec = next;
        state.u.setData(columns(next), false);
        show(state, state.view);
        state.u.redraw(false, true);
        return true;
      },
      resize() {
        const next = size(box);
        if (next.width > 0 && next.width !== state.u.width) state.u.setSize(next);
      },
      recolour: () => state.u.redraw(false, true),
      destroy() {
        state.u.destroy();
        mount.remove();
      },
      get view() { return state.view; },
    };
  }

  return { make };
})();
