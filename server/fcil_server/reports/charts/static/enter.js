"use strict";
/* Lets this browser in with the one-time token of a link. The token stands behind the #, which
   browsers keep to themselves: it is in no log, and here it leaves the address at once. */

(() => {
  const says = document.getElementById("enter-says");
  const form = document.getElementById("enter-form");
  const field = document.getElementById("enter-token");

  function refuse(sentence) {
    says.className = "says fault";
    says.textContent = sentence;
    field.focus();
  }

  async function enter(token) {
    const options = { method: "POST", headers: { "Content-Type": "application/json" }, credentials: "same-origin" };
    let response = null;
    try {
      response = await fetch("/enter", { ...options, body: JSON.stringify({ token }) });
    } catch {
      refuse("The dashboard cannot be reached. Is the server running?");
      return;
    }
    if (response.ok) {
      location.replace("/");
      return;
    }
    const { error } = await response.json().catch(() => ({}));
    refuse([error?.says ?? `The server answered with status ${response.status}.`, error?.action].filter(Boolean).join(" "));
  }

  form.addEventListener("submit", (event) => {
    event.preventDefault();
    const text = field.value.trim();
    field.value = "";
    enter(text.slice(text.lastIndexOf("#") + 1)); // a whole link does as well
  });

  function fromAddress() {
    const token = location.hash.slice(1);
    if (!token) return;
    history.replaceState(null, "", location.pathname);
    says.textContent = "Opening …";
    enter(token);
  }

  /** Who comes by a link of another site comes without the cookie, which is for this site alone: such
      a browser may be let in already, and only has to come once more by itself. */
  async function already() {
    if (location.pathname === "/enter" || document.referrer.startsWith(`${location.origin}/`)) return;
    const response = await fetch("/part/head", { credentials: "same-origin" }).catch(() => null);
    if (response?.ok) location.replace(location.pathname + location.search);
  }

  addEventListener("hashchange", fromAddress);
  if (location.hash) fromAddress();
  else already();
})();
