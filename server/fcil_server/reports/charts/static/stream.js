"use strict";
/* The line to the server on which changed sections come, for as long as somebody looks. */

fcil.stream = (() => {
  const LONGEST_S = 30; // between two tries
  const QUIET_MS = 45000; // the server says something every 15 s: three times nothing is a dead line
  const HIDDEN_MS = 60000; // a tab that nobody sees for so long frees its connection
  const { dataset } = document.documentElement;
  const fixed = new URLSearchParams(location.search).get("run"); // an earlier run was asked for
  let newest = Number(document.body.dataset.newest) || 0;
  let source = null;
  let tries = 0;
  let retry = 0;
  let quiet = 0;
  let hidden = 0;
  let ended = false;
  let before = null; // the hello before this one
  let heard = Date.now();

  const WORDS = { connecting: "connecting", live: "live", reconnecting: "reconnecting", stopped: "server stopped",
    earlier: "earlier run", out: "signed out" };

  function state(name) {
    const place = document.getElementById("live");
    if (place.dataset.state === name) return;
    place.dataset.state = name;
    place.textContent = WORDS[name];
  }

  function open() {
    clearTimeout(retry);
    if (source || ended) return;
    const query = new URLSearchParams({ since: newest });
    if (fixed) query.set("run", fixed);
    source = new EventSource(`/stream?${query}`);
    const on = (name, act) => source.addEventListener(name, (event) => {
      heard = Date.now();
      listen();
      act(JSON.parse(event.data || "{}"));
    });
    on("hello", hello);
    on("section", ({ name, version, html }) => {
      newest = Math.max(newest, version);
      fcil.parts.pushed(name, html);
    });
    on("gone", ({ says }) => {
      state("stopped");
      fcil.banner.say("server", says || "The server does not answer; the dashboard shows what the ledger holds.");
    });
    let armed = false;
    on("tick", () => {
      armed = true;
      listen();
    });
    source.onerror = () => lost(source?.readyState === EventSource.CLOSED);

    function listen() {
      clearTimeout(quiet);
      if (armed) quiet = setTimeout(() => lost(false), QUIET_MS);
    }
  }

  function hello(told) {
    tries = 0;
    dataset.csrf = told.csrf;
    if (told.now) fcil.told.setClock(told.now);
    fcil.banner.clear("line");
    delete dataset.stale;
    if (told.live) fcil.banner.clear("server");
    state(told.live ? "live" : fixed ? "earlier" : "stopped");
    const changed = before && (before.version !== told.version || before.read_only !== told.read_only
      || (!fixed && before.run !== told.run));
    before = told;
    if (!fixed) dataset.run = told.run ?? "";
    // Another run, or an upgraded server: header, menu and scripts are of the page before.
    if (changed) fcil.dialogs.whenClosed(() => location.reload());
  }

  /** The line broke; refused: the server answered, and not with a stream. */
  function lost(refused) {
    close();
    tries += 1;
    state("reconnecting");
    const wait = Math.min(LONGEST_S, 2 ** (tries - 1)) * (0.75 + Math.random() / 2);
    if (tries > 2) {
      const why = refused ? "The dashboard has too many readers at the moment, or is starting"
        : "The dashboard cannot be reached: the server has stopped, or the network is down";
      fcil.banner.say("line", `${why}. The view below is as of ${new Date(heard).toLocaleTimeString()}; the dashboard reconnects automatically.`);
      dataset.stale = "";
    }
    retry = setTimeout(open, wait * 1000);
    // Why a stream was refused cannot be seen, but whether this browser is still let in can.
    if (refused) fcil.ask(fcil.parts.path("head", "")).catch(() => {});
  }

  function close() {
    clearTimeout(quiet);
    clearTimeout(retry);
    source?.close();
    source = null;
  }

  document.addEventListener("visibilitychange", () => {
    clearTimeout(hidden);
    if (document.hidden) hidden = setTimeout(close, HIDDEN_MS);
    else if (!source) {
      tries = 0;
      open();
    }
  });
  addEventListener("pagehide", close);
  addEventListener("pageshow", (event) => {
    if (event.persisted) open();
  });

  open();

  return {
    end() {
      ended = true;
      close();
      state("out");
      dataset.stale = "";
    },
  };
})();
