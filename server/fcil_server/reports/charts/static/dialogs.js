"use strict";
/* The one dialog of the page: details of a client, the comparison of runs, and the acts. */

fcil.dialogs = (() => {
  const PAUSE_MS = 3000; // between two looks at a client that is being shown
  const FOLLOWED = new Set(["clients", "rounds"]); // sections that tell that a client has changed
  const dialog = document.getElementById("dialog");
  const body = document.getElementById("dialog-body");
  let shown = ""; // the address of what is fetched into it
  let asked = 0; // counts: only the newest answer is shown
  let timer = 0;
  let afterwards = null;

  function label() {
    const heading = body.querySelector("h2");
    dialog.setAttribute("aria-label", heading?.textContent.trim() || "Details");
  }

  function open(small) {
    dialog.classList.toggle("small", small);
    if (!dialog.open) dialog.showModal();
    label();
  }

  /** Show nodes made here, in place of what is in the dialog. */
  function show(...nodes) {
    shown = "";
    asked += 1;
    body.replaceChildren(...nodes);
    fcil.charts.scan(document);
    open(true);
    (body.querySelector("[autofocus]") ?? body.querySelector("input:not([readonly]), select, button") ?? dialog).focus();
  }

  /** Fetch a part of the page, and show it. */
  async function load(path, again = false) {
    const alike = path.split("?")[0] === shown.split("?")[0]; // what is in hand can stay
    shown = path;
    asked += 1;
    const mine = asked;
    let html = "";
    try {
      html = await fcil.ask(path);
    } catch (error) {
      if (mine === asked && !again) fault(fcil.sentence(error));
      return;
    }
    if (mine !== asked || (again && !dialog.open)) return;
    if (!alike) body.replaceChildren();
    fcil.parts.morph(body, html, "innerHTML");
    fcil.told.times(body);
    if (again) label();
    else {
      open(false);
      fcil.charts.scan(document);
      dialog.scrollTop = 0;
    }
  }

  function fault(sentence) {
    body.replaceChildren(fcil.make("p", { class: "says fault", role: "alert", text: sentence }));
    open(true);
  }

  /** A section has changed: a client that is being shown is looked at again. */
  function follow(name) {
    if (!dialog.open || !shown.startsWith("/part/client?") || !FOLLOWED.has(name) || timer) return;
    timer = setTimeout(() => {
      timer = 0;
      if (dialog.open && shown.startsWith("/part/client?")) load(shown, true);
    }, PAUSE_MS);
  }

  dialog.addEventListener("close", () => {
    shown = "";
    asked += 1;
    body.replaceChildren(); // a ticket does not stay behind
    fcil.charts.scan(document);
    if (afterwards) afterwards();
  });

  document.addEventListener("click", (event) => {
    if (event.ctrlKey || event.metaKey || event.shiftKey) return;
    const link = event.target.closest("[data-client], [data-compare]");
    if (!link) return;
    event.preventDefault();
    const { client } = link.dataset;
    load(client === undefined ? "/part/compare" : fcil.parts.path("client", new URLSearchParams({ id: client })));
  });

  return {
    show,
    open: load,
    close: () => dialog.close(),
    follow,
    body,
    /** Do something now, or as soon as the dialog is closed. */
    whenClosed(act) {
      if (dialog.open) afterwards = act;
      else act();
    },
  };
})();
