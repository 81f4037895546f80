"use strict";
/* How charts look: colours of the style sheet, dashes for lines, hatches for bars, and what is drawn
   by hand on uPlot's canvas (stacked bars, a level, marks). Every style differs in form as well. */

fcil.draw = (() => {
  const DASHES = { a: [], b: [1, 3], c: [5, 4], d: [9, 3], e: [9, 3, 2, 3], f: [3, 3] };
  const TILE = 6; // a hatch repeats after so many CSS pixels
  const HATCHES = {
    a: [],
    b: [[0, 1, 1, 0]],
    c: [[0, 0, 1, 1]],
    d: [[0, 0.5, 1, 0.5]],
    e: [[0, 1, 1, 0], [0, 0, 1, 1]],
    f: [[0.5, 0, 0.5, 1]],
  };
  const WIDEST = 28; // CSS pixels; a lone bar as wide as the chart says nothing more
  const LEVEL_ROOM = 4; // a level more than this times above the bars would flatten them: not drawn
  const patterns = new Map();
  const colours = new Map();

  /** A colour of the style sheet, by its name there. */
  function colour(name) {
    if (!colours.has(name)) {
      const style = getComputedStyle(document.documentElement);
      colours.set(name, style.getPropertyValue(`--${name}`).trim());
    }
    return colours.get(name);
  }

  /** Forget what belongs to the theme of before. */
  function retheme() {
    colours.clear();
    patterns.clear();
  }

  /** What a bar of a style is filled with: its colour, with lines of the page's colour over it. */
  function fill(context, style, ratio) {
    const lines = HATCHES[style] ?? [];
    if (!lines.length) return colour(style);
    const key = `${style} ${ratio}`;
    if (!patterns.has(key)) {
      const size = Math.round(TILE * ratio);
      const tile = fcil.make("canvas", { width: size, height: size });
      const pen = tile.getContext("2d");
      pen.fillStyle = colour(style);
      pen.fillRect(0, 0, size, size);
      pen.strokeStyle = colour("page");
      pen.lineWidth = 1.5 * ratio;
      pen.lineCap = "square";
      for (const [x1, y1, x2, y2] of lines) {
        // Three times, so that corners of neighbouring tiles are filled too.
        for (const shift of x1 !== x2 && y1 !== y2 ? [-1, 0, 1] : [0]) {
          pen.beginPath();
          pen.moveTo((x1 + shift) * size, y1 * size);
          pen.lineTo((x2 + shift) * size, y2 * size);
          pen.stroke();
        }
      }
      patterns.set(key, context.createPattern(tile, "repeat"));
    }
    return patterns.get(key);
  }

  /** The stacks of a bar chart in their order, each with its series; lines belong to none. */
  function stacks(spec) {
    const found = new Map();
    for (const series of spec.series) {
      if (spec.kind !== "bars" || !series.stack) continue;
      if (!found.has(series.stack)) found.set(series.stack, []);
      found.get(series.stack).push(series);
    }
    return found;
  }

  const total = (pieces, index) => pieces.reduce((sum, s) => sum + (s.values[index] ?? 0), 0);

  /** An axis around some values, with a little room at both ends; it never begins below zero for them. */
  function around(values) {
    const low = values.length ? Math.min(...values) : 0;
    const high = values.length ? Math.max(...values) : 1;
    const room = (high - low) * 0.08 || Math.abs(high) * 0.05 || 1;
    return [low < 0 ? low - room : Math.max(0, low - room), high + room];
  }

  /** The values of lines and points between two positions. */
  function within(spec, from, to) {
    const found = spec.kind === "xy"
      ? spec.series.flatMap((s) => s.points.filter(([x]) => x >= from && x <= to).map(([, y]) => y))
      : spec.series.flatMap((s) => s.values.slice(Math.max(0, Math.ceil(from)), Math.floor(to) + 1));
    return found.filter((value) => value !== null && value !== undefined);
  }

  /** Both ends of the value axis, for what lies between two positions. */
  function ends(spec, from, to) {
    if (!spec.y.zoom) return [0, top(spec, from, to)];
    const [low, high] = around(within(spec, from, to));
    const most = spec.y.max ?? Infinity;
    return [low, Math.min(high, most + (most - low) * 0.04)]; // room for a dot, and for no tick
  }

  /** Where an axis from zero ends. */
  function top(spec, from, to) {
    if (spec.y.max !== null && spec.y.max !== undefined) return spec.y.max * 1.02;
    if (spec.kind === "xy") return Math.max(...within(spec, from, to), 1) * 1.04;
    let most = 0;
    const bars = [...stacks(spec).values()];
    const lines = spec.series.filter((s) => spec.kind !== "bars" || !s.stack);
    for (let i = Math.max(0, Math.ceil(from)); i <= to; i += 1) {
      for (const pieces of bars) most = Math.max(most, total(pieces, i));
      for (const line of lines) most = Math.max(most, line.values?.[i] ?? 0);
    }
    if (spec.level && spec.level.value <= most * LEVEL_ROOM) most = Math.max(most, spec.level.value);
    return (most || 1) * 1.08;
  }

  /** Do a piece of drawing inside the plot's area, and leave the canvas as it was. */
  function inside(u, work) {
    const { left, top: upper, width, height } = u.bbox;
    u.ctx.save();
    u.ctx.beginPath();
    u.ctx.rect(left, upper, width, height);
    u.ctx.clip();
    work(u.ctx, u.bbox, uPlot.pxRatio);
    u.ctx.restore();
  }

  /** Stacked bars, the stacks of one position side by side. */
  function bars(u, spec) {
    const groups = [...stacks(spec).values()];
    if (!groups.length) return;
    inside(u, (context, _, ratio) => {
      const step = u.valToPos(1, "x", true) - u.valToPos(0, "x", true);
      const width = Math.min(WIDEST * ratio, (step * 0.8) / groups.length);
      const from = Math.max(0, Math.floor(u.scales.x.min));
      const to = Math.min(u.data[0].length - 1, Math.ceil(u.scales.x.max));
      for (let i = from; i <= to; i += 1) {
        const centre = u.valToPos(i, "x", true);
        groups.forEach((pieces, number) => {
          const left = centre + width * (number - groups.length / 2);
          const wide = Math.max(1, width - (groups.length > 1 && width > 6 ? ratio : 0));
          let sum = 0;
          for (const piece of pieces) {
            const value = piece.values[i] ?? 0;
            const low = u.valToPos(sum, "y", true);
            sum += value;
            const high = u.valToPos(sum, "y", true);
            if (low - high < 0.1) continue;
            context.fillStyle = width > 4 * ratio ? fill(context, piece.style, ratio) : colour(piece.style);
            context.fillRect(left, high, wide, low - high);
          }
        });
      }
    });
  }

  /** The level that a method claims, and where tasks begin. */
  function annotations(u, spec) {
    inside(u, (context, box, ratio) => {
      context.font = `${12 * ratio}px system-ui, sans-serif`;
      context.fillStyle = colour("text");
      context.textAlign = "left";
      context.textBaseline = "bottom";
      if (spec.level && spec.level.value <= u.scales.y.max) {
        const y = u.valToPos(spec.level.value, "y", true);
        stroke(context, [box.left, y, box.left + box.width, y], "text", [6 * ratio, 4 * ratio], 1.5 * ratio);
        context.fillText(spec.level.text, box.left + 6 * ratio, y - 3 * ratio);
      }
      for (const mark of spec.marks ?? []) {
        const x = place(u, spec, mark);
        stroke(context, [x, box.top, x, box.top + box.height], "edge", [2 * ratio, 3 * ratio], ratio);
      }
    });
    titles(u, spec);
  }

  /** Above the plot, where no line runs through them: the texts of the marks. */
  function titles(u, spec) {
    const { ctx: context, bbox: box } = u;
    const ratio = uPlot.pxRatio;
    context.save();
    context.font = `${12 * ratio}px system-ui, sans-serif`;
    context.fillStyle = colour("faint");
    context.textAlign = "left";
    context.textBaseline = "bottom";
    let free = -Infinity; // texts that would run into the one before are left out
    for (const mark of spec.marks ?? []) {
      const x = place(u, spec, mark);
      if (x < box.left || x > box.left + box.width) continue;
      const wide = context.measureText(mark.text).width;
      const at = Math.min(x, box.left + box.width - wide);
      if (at < free) continue;
      context.fillText(mark.text, at, box.top - 2 * ratio);
      free = at + wide + 8 * ratio;
    }
    context.restore();
  }

  function place(u, spec, mark) {
    return u.valToPos(spec.kind === "bars" ? mark.at - 0.5 : mark.at, "x", true);
  }

  function stroke(context, [x1, y1, x2, y2], name, dash, width) {
    context.strokeStyle = colour(name);
    context.lineWidth = width;
    context.setLineDash(dash);
    context.beginPath();
    context.moveTo(x1, y1);
    context.lineTo(x2, y2);
    context.stroke();
    context.setLineDash([]);
  }

  return { DASHES, colour, retheme, stacks, total, around, ends, bars, annotations };
})();
