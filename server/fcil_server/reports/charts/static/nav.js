"use strict";
/* Ways through the page: the list of its sections, which marks the one in view, and the menu. */

/** The menu closes when something in it was chosen, outside of it was pressed, or with Escape. */
(() => {
  const menu = document.getElementById("menu");
  document.addEventListener("click", (event) => {
    if (!menu.contains(event.target) || event.target.closest("a, button")) menu.open = false;
  });
  menu.addEventListener("keydown", (event) => {
    if (event.key !== "Escape" || !menu.open) return;
    menu.open = false;
    menu.querySelector("summary").focus();
  });
})();

/** The section in view is the last that begins in the upper quarter of the window. Of those that
    begin side by side, and at the page's end where none can come so high, it is the chosen one. */
(() => {
  const links = [...document.querySelectorAll('nav a[href^="#"]')];
  const names = [...new Set(links.map((link) => link.hash.slice(1)))];
  let waiting = false;

  function inView() {
    const tops = new Map();
    for (const name of names) {
      const section = document.getElementById(name);
      if (section) tops.set(name, Math.round(section.getBoundingClientRect().top));
    }
    const chosen = location.hash.slice(1);
    const atEnd = innerHeight + scrollY >= document.documentElement.scrollHeight - 2;
    if (atEnd && scrollY > 0) return tops.get(chosen) >= 0 ? chosen : names.at(-1);
    const above = names.filter((name) => tops.get(name) <= innerHeight / 4);
    const last = scrollY > 0 ? above.at(-1) ?? names[0] : names[0];
    const pair = above.filter((name) => tops.get(name) === tops.get(last));
    return pair.includes(chosen) ? chosen : pair[0] ?? last;
  }

  function mark() {
    waiting = false;
    const name = inView();
    for (const link of links) {
      const is = link.hash === `#${name}`;
      if (is && !link.hasAttribute("aria-current")) link.setAttribute("aria-current", "location");
      else if (!is) link.removeAttribute("aria-current");
    }
  }

  function soon() {
    if (!waiting) requestAnimationFrame(mark);
    waiting = true;
  }

  for (const type of ["scroll", "resize", "hashchange"]) addEventListener(type, soon, { passive: true });
  mark();
})();
