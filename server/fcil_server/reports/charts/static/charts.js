"use strict";
/* Which figures of the page have a moving chart, from the first look until they are taken away. */

fcil.charts = (() => {
  const held = new Map(); // .plot -> {chart, text of its spec}
  const waiting = new Set();
  let marked = false;

  const sizes = new ResizeObserver((entries) => {
    for (const { target, contentRect } of entries) {
      if (!contentRect.width) continue; // folded away
      if (held.has(target)) held.get(target).chart?.resize();
      else if (!waiting.has(target)) waiting.add(target);
    }
    if (waiting.size) requestAnimationFrame(work);
  });

  /** Draw one chart a frame, so that nothing else has to wait for all of them. */
  function work() {
    const [plot] = waiting;
    waiting.delete(plot);
    if (plot?.isConnected && !held.has(plot)) draw(plot, null);
    if (waiting.size) requestAnimationFrame(work);
    else mark();
  }

  const text = (plot) => plot.closest("figure.chart")?.querySelector("script.spec")?.textContent ?? "";

  function draw(plot, view) {
    const source = text(plot);
    if (!source) return;
    let chart = null; // of a spec that cannot be drawn; not tried again until it changes
    try {
      chart = fcil.chart.make(plot, JSON.parse(source), view);
      plot.setAttribute("data-drawn", "");
    } catch (error) {
      plot.removeAttribute("data-drawn");
      console.error("the chart stays a still picture:", error);
    }
    held.set(plot, { chart, source });
  }

  /** Look at the figures below `root`: new ones are drawn, changed ones follow, lost ones end. */
  function scan(root) {
    for (const [plot, { chart }] of held) {
      if (plot.isConnected) continue;
      chart?.destroy();
      sizes.unobserve(plot);
      held.delete(plot);
    }
    for (const plot of root.querySelectorAll("figure.chart > .plot")) {
      if (held.has(plot)) follow(plot);
      else sizes.observe(plot);
    }
  }

  function follow(plot) {
    const { chart, source } = held.get(plot);
    const next = text(plot);
    if (next === source) return;
    let kept = false;
    try {
      kept = chart?.update(JSON.parse(next)) ?? false;
    } catch (error) {
      console.error("the chart is drawn anew:", error);
    }
    if (kept) {
      held.set(plot, { chart, source: next });
      return;
    }
    const view = chart?.view ?? null;
    chart?.destroy();
    draw(plot, view?.last ? view : null);
  }

  /** Says once that the first charts are drawn: whoever measures the page waits for it. */
  function mark() {
    if (marked) return;
    marked = true;
    performance.mark("fcil-charts");
  }

  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    fcil.draw.retheme();
    for (const { chart } of held.values()) chart?.recolour();
  });

  scan(document);
  // Sizes are told before the next frame is painted; by the one after it, what can be drawn waits.
  requestAnimationFrame(() => requestAnimationFrame(() => { if (!waiting.size) mark(); }));

  return { scan };
})();
