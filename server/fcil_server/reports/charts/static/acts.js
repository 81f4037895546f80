"use strict";
/* Acts of the operator, each in three steps: the form says what is wanted, the server says in a
   sentence what would happen, and only what was confirmed is carried out. */

(() => {
  const GRAVE = new Set(["revoke", "drain", "close_round"]);
  const { make, dialogs } = fcil;

  const says = (text = "") => make("p", { class: "says", role: "status", text });

  function refuse(place, error) {
    place.className = "says fault";
    place.setAttribute("role", "alert");
    place.textContent = fcil.sentence(error);
  }

  /** Do something that takes a moment; no button of the dialog can be pressed meanwhile. */
  async function busy(work) {
    const buttons = [...dialogs.body.querySelectorAll("button:not(:disabled)")];
    for (const button of buttons) button.disabled = true;
    try {
      await work();
    } finally {
      for (const button of buttons) button.disabled = false;
    }
  }

  /** What the button says about the act already: its data-field-… attributes. */
  function given(button) {
    const fields = {};
    for (const name of button.getAttributeNames()) {
      if (name.startsWith("data-field-")) fields[name.slice("data-field-".length)] = button.getAttribute(name);
    }
    return fields;
  }

  /** What a form holds; what was left empty is left out. */
  function filled(form) {
    const fields = {};
    for (const element of form.elements) {
      if (!element.name) continue;
      if (element.type === "checkbox") fields[element.name] = element.checked;
      else if (element.value.trim()) fields[element.name] = element.value.trim();
    }
    return fields;
  }

  function begin(act, title, fields) {
    fcil.banner.clear("act");
    const template = document.getElementById(`act-${act}`);
    const place = says();
    if (!template) {
      dialogs.show(make("h2", { text: title }), make("p", { text: "Asking the server …" }), place);
      prepare(act, title, fields, place);
      return;
    }
    const content = template.content.cloneNode(true);
    const form = content.querySelector("form");
    for (const element of form.elements) {
      if (!Object.hasOwn(fields, element.name)) continue;
      element.value = fields[element.name];
      element.readOnly = true; // whom it is about was chosen on the page
    }
    content.append(place);
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      prepare(act, title, { ...fields, ...filled(form) }, place);
    });
    dialogs.show(content);
  }

  async function prepare(act, title, fields, place) {
    await busy(async () => {
      try {
        const answer = await fcil.ask("/act/prepare", { post: { act, ...fields } });
        if (place.isConnected) confirm(act, title, fields, answer); // else: closed meanwhile
      } catch (error) {
        refuse(place, error);
      }
    });
  }

  /** Show what would happen, and ask. */
  function confirm(act, title, fields, answer) {
    const grave = GRAVE.has(act);
    const yes = make("button", { type: "button", class: grave ? "danger" : "primary", text: "Confirm",
      "aria-describedby": "act-says" });
    const no = make("button", { type: "button", text: "Cancel", "aria-describedby": "act-says" });
    (grave ? no : yes).setAttribute("autofocus", "");
    const place = says();
    yes.addEventListener("click", () => busy(async () => {
      try {
        const result = await fcil.ask("/act/carry-out", { post: { confirm: answer.confirm } });
        // Who closed the dialog meanwhile is not disturbed, but for a ticket, which is seen only here.
        if (place.isConnected || result.ticket) done(title, result);
        else fcil.told.say(result.says);
      } catch (error) {
        if (!place.isConnected) {
          fcil.banner.say("act", fcil.sentence(error));
          return;
        }
        refuse(place, error);
        yes.remove(); // its word is used up, or too old
        const again = make("button", { type: "button", text: "Start again" });
        again.addEventListener("click", () => begin(act, title, fields));
        no.before(again);
      }
    }));
    no.addEventListener("click", dialogs.close);
    dialogs.show(make("h2", { text: title }), make("p", { id: "act-says", text: answer.says }),
      place, make("div", { class: "answers" }, yes, no));
  }

  function done(title, answer) {
    const nodes = [make("h2", { text: title }), make("p", { class: "says", role: "status", text: answer.says })];
    if (answer.warning) nodes.push(make("p", { class: "banner", text: answer.warning }));
    if (answer.ticket) nodes.push(...ticket(answer));
    dialogs.show(...nodes);
    document.getElementById("dialog-close").focus();
  }

  /** The ticket as text and as a picture. It is shown once, and gone when the dialog is closed. */
  function ticket(answer) {
    const text = make("pre", { class: "ticket", id: "ticket", tabindex: "0", "aria-label": "Ticket", text: answer.ticket });
    const copied = says();
    const copy = make("button", { type: "button", text: "Copy the ticket" });
    copy.addEventListener("click", async () => {
      try {
        await navigator.clipboard.writeText(answer.ticket);
        copied.textContent = "Copied.";
      } catch {
        getSelection().selectAllChildren(text);
        copied.textContent = "The browser does not allow copying: the ticket is selected, press Ctrl+C.";
      }
    });
    const nodes = [text, copy, copied];
    if (answer.qr) {
      const picture = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(answer.qr)}`;
      nodes.push(make("img", { class: "qr", alt: "The ticket as a QR code", src: picture }));
    }
    if (answer.run_this) {
      nodes.push(make("p", { text: "On the client:" }), make("pre", {}, make("code", { text: answer.run_this })));
    }
    const facts = [["Valid until", answer.expires && new Date(answer.expires * 1000).toLocaleString()],
      ["Server", answer.addresses?.join(", ")], ["Fingerprint", answer.fingerprint]];
    const list = make("dl", { class: "facts" });
    for (const [name, value] of facts) {
      if (value) list.append(make("div", {}, make("dt", { text: name }), make("dd", { text: value })));
    }
    return [...nodes, list];
  }

  document.addEventListener("click", (event) => {
    const button = event.target.closest("[data-act]");
    if (!button) return;
    event.preventDefault();
    begin(button.dataset.act, button.textContent.replace("…", "").trim(), given(button));
  });

  document.getElementById("leave").addEventListener("click", async () => {
    try {
      await fcil.ask("/leave", { post: {} });
      location.assign("/enter");
    } catch (error) {
      fcil.banner.say("leave", fcil.sentence(error));
    }
  });

})();
