// The regret explorer: responses as text, each token shaded by its reward or its term of the regret.
// Texts come from models and data: they enter the page as text nodes only, never as markup.
"use strict";
(() => {
  const data = JSON.parse(document.getElementById("token-data").textContent);
  const root = document.getElementById("tokens");
  const form = root.querySelector("form");
  const card = document.getElementById("token-card");
  const news = document.getElementById("token-news");
  const LEVELS = 8; // steps of the color scale on each side of zero
  const state = {};
  const responses = []; // of all pairs, in the page's order
  const scales = new Map(); // values of the full shade, by measure and reference
  let scale = 1;

  const make = (tag, className, text) => {
    const node = document.createElement(tag);
    if (className) node.className = className;
    if (text !== undefined) node.textContent = text;
    return node;
  };
  const signed = (value) => (value < 0 ? "−" : "+") + Math.abs(value).toFixed(3);
  const number = (value) => (value === null ? "unknown" : value.toFixed(3).replace("-", "−"));
  const modelName = (index) => (index < 0 ? "reference" : data.models[index]);
  const logps = (response, index) => (index < 0 ? response.reference : response.logps[index]);

  // --- values -------------------------------------------------------------------------------------------------------

  /** What tokens are shaded by, from log-probabilities of policy, reference and behavior policy, and the weight. */
  const measures = {
    reward: (pi, rho) => data.beta * (pi - rho),
    horizon: (pi, rho, mu, weight) => data.beta * weight * (pi - mu),
    regret: (pi, rho, mu, weight) => data.beta * (pi - rho) + data.beta * weight * (pi - mu),
    det: (pi, rho, mu, weight) => data.beta * (pi - rho) + data.beta * weight * pi,
  };
  const isKnown = (response, measure) => response.behavior !== null || (measure !== "horizon" && measure !== "regret");

  /** Numbers of token i (nats): log-probabilities, weight and terms; null where the behavior policy is unknown. */
  function termsOf(response, i) {
    const pi = logps(response, state.policy)[i];
    const rho = logps(response, state.against)[i];
    const mu = response.behavior && response.behavior[i];
    const weight = response.weights[i];
    const term = (measure) => (isKnown(response, measure) ? measures[measure](pi, rho, mu, weight) : null);
    const terms = Object.fromEntries(Object.keys(measures).map((measure) => [measure, term(measure)]));
    return { pi, rho, mu, weight, ...terms };
  }

  /** Values of all tokens under the chosen objective, or null where they are unknown. */
  function valuesOf(response, policy = state.policy) {
    if (!isKnown(response, state.measure)) return null;
    const [pi, rho] = [logps(response, policy), logps(response, state.against)];
    const mu = response.behavior || pi; // not read where it is unknown
    const value = measures[state.measure];
    const values = new Float64Array(pi.length);
    for (let i = 0; i < pi.length; i++) values[i] = value(pi[i], rho[i], mu[i], response.weights[i]);
    return values;
  }

  const rootMeanSquare = (values) => Math.sqrt(values.reduce((sum, value) => sum + value * value, 0) / values.length);

  /** Value of the full shade: 2 × RMS when normalized; else, in nats, a quantile of all tokens of all models. */
  function fullShade() {
    if (state.scale === "normalized") return 2;
    const key = `${state.measure} ${state.against}`;
    if (!scales.has(key)) scales.set(key, quantileOfSizes());
    return scales.get(key);
  }

  function quantileOfSizes() {
    const models = [...data.models.keys()];
    const known = responses.flatMap((response) => models.map((policy) => valuesOf(response, policy))).filter(Boolean);
    const sizes = new Float64Array(known.reduce((sum, values) => sum + values.length, 0));
    let start = 0;
    for (const values of known) {
      sizes.set(values.map(Math.abs), start);
      start += values.length;
    }
    sizes.sort();
    const place = data.shade_quantile * (sizes.length - 1);
    const [below, above] = [sizes[Math.floor(place)], sizes[Math.ceil(place)]];
    return below + (place % 1) * (above - below) || 1;
  }

  // --- responses ----------------------------------------------------------------------------------------------------

  /** Class of a token with this value: p1…p8 above zero, n1…n8 below, none about zero and where it is unknown. */
  function shadeOf(value) {
    const level = Math.round(LEVELS * Math.max(-1, Math.min(1, value / scale)));
    return level ? ` ${level > 0 ? "p" : "n"} k${Math.abs(level)}` : "";
  }

  function shade(response) {
    const values = valuesOf(response);
    const unit = values && state.scale === "normalized" ? rootMeanSquare(values) || 1 : 1;
    response.values = values && values.map((value) => value / unit);
    const sum = values && values.reduce((total, value) => total + value, 0);
    fillUnits(response);
    response.sum.textContent = values ? `Σ ${signed(sum)} nats` : "behavior policy unknown: no such term";
    if (!response.spans) return;
    for (const [i, span] of response.spans.entries()) {
      span.className = response.kinds[i] + (values ? shadeOf(response.values[i]) : "");
    }
  }

  const UNITS = ["tokens", "regret", "local", "future", "DPO", "RePO", "RePO_det"];
  const short = (value) => (value === null ? "unknown" : value.toFixed(2).replace("-", "−"));

  /** Measured regret of each unit, beside what three methods read into the model. */
  function fillUnits(response) {
    if (!response.unitRows) return;
    for (const [index, [start, end, regret, low, high, local, future, read]] of response.units.entries()) {
      const texts = [`${start + 1}–${end}`, `${short(regret)} (${short(low)} to ${short(high)})`];
      texts.push(...[local, future, ...read[state.policy]].map(short));
      for (const [column, text] of texts.entries()) response.unitRows[index].cells[column].textContent = text;
    }
  }

  function buildUnits(response) {
    const box = make("div", "wide units");
    box.tabIndex = 0;
    box.setAttribute("role", "group");
    box.setAttribute("aria-label", `Measured regret of the ${response.side} response's units`);
    const table = make("table");
    const caption = `Measured regret of each unit (95 % interval), α = ${response.alpha}; what methods read, in nats`;
    table.createCaption().append(make("span", "", caption));
    const head = table.createTHead().insertRow();
    for (const name of UNITS) {
      const cell = make("th", "", name);
      cell.scope = "col";
      head.append(cell);
    }
    const body = table.createTBody();
    response.unitRows = response.units.map(() => {
      const row = body.insertRow();
      for (const name of UNITS) row.insertCell().className = name === "tokens" ? "" : "number";
      return row;
    });
    box.append(table);
    return box;
  }

  /** Render a response's tokens as elements when it comes near the window; until then it is one plain text. */
  function fill(response) {
    if (response.spans) return;
    const parts = document.createDocumentFragment();
    response.spans = response.tokens.map((text, i) => {
      const span = make("span");
      for (const [number, line] of text.split("\n").entries()) {
        if (number) span.append(make("span", "line-end"), "\n");
        if (line) span.append(line);
      }
      span.tabIndex = i === response.place ? 0 : -1;
      span.dataset.i = i;
      parts.append(span);
      return span;
    });
    shade(response);
    response.box.replaceChildren(parts);
  }

  function empty(response) {
    if (!response.spans || response.box.contains(document.activeElement)) return;
    response.spans = null;
    response.box.textContent = response.tokens.join("");
  }

  const nearby = new IntersectionObserver(
    (entries) => entries.forEach(({ target, isIntersecting }) => (isIntersecting ? fill : empty)(target.response)),
    { rootMargin: "1000px 0px" },
  );

  function buildResponse(response) {
    const side = make("div", `side ${response.side}`);
    const head = make("div", "head");
    response.sum = make("span", "note sum");
    const save = make("button", "", "Save as SVG");
    save.type = "button";
    save.setAttribute("aria-label", `Save the ${response.side} response as an SVG file`);
    save.addEventListener("click", () => saveResponse(response));
    head.append(make("h4", "", response.side), make("span", "note", `${response.tokens.length} tokens`), response.sum, save);
    response.box = make("div", "shaded", response.tokens.join(""));
    response.box.dir = "auto";
    response.box.setAttribute("role", "group");
    response.box.setAttribute("aria-label", `${response.side} response: move between tokens with the arrow keys`);
    response.box.response = response;
    response.place = 0;
    const special = new Set(response.special);
    response.kinds = response.tokens.map((_, i) => (special.has(i) ? "t special" : "t"));
    side.append(head, response.box);
    if (response.units) side.append(buildUnits(response));
    if (response.hidden) side.append(make("p", "note", `${response.hidden} more tokens are not shown.`));
    responses.push(response);
    nearby.observe(response.box);
    return side;
  }

  function saveResponse(response) {
    const measure = form.elements.measure.selectedOptions[0].text;
    const title = `${modelName(state.policy)} against ${modelName(state.against)} · ${measure} · ${response.side} response`;
    const ends = [".low", ".high"].map((end) => form.querySelector(end).textContent);
    const name = `${modelName(state.policy)}-${state.measure}-${response.side}.svg`;
    fill(response);
    saveFigure(response.box, title, ends, name);
  }

  function buildPair(pair, index) {
    const article = make("article");
    const title = make("h3", "", `Pair ${index + 1} `);
    title.append(make("span", "muted", `· ${pair.kind}`));
    const prompt = make("div", "prompt");
    for (const message of pair.prompt) {
      const block = make("div", "text");
      block.dir = "auto";
      if (message.role) block.append(make("span", "role", message.role));
      block.append(message.content);
      prompt.append(block);
    }
    const sides = make("div", "sides");
    sides.append(...pair.responses.map(buildResponse));
    article.append(title, prompt, sides);
    return article;
  }

  // --- one token's numbers ------------------------------------------------------------------------------------------

  function rowsOf(response, i) {
    const terms = termsOf(response, i);
    const beta = data.beta === 1 ? "" : `${data.beta} `;
    const unknown = "unknown";
    const nats = (value) => (value === null ? unknown : `${signed(value)} nats`);
    const rows = [
      ["log π", modelName(state.policy), `${number(terms.pi)} nats`],
      ["log ρ", modelName(state.against), `${number(terms.rho)} nats`],
    ];
    if (state.against >= 0) rows.push(["", "reference", `${number(response.reference[i])} nats`]);
    rows.push(
      ["log μ", "behavior", terms.mu === null ? unknown : `${number(terms.mu)} nats`],
      ["w", "weight", terms.weight.toFixed(3)],
      [`${beta}log π/ρ`, "reward (local term)", nats(terms.reward), "reward"],
      [`${beta}w log π/μ`, "long-horizon term", nats(terms.horizon), "horizon"],
      ["sum", "regret term", nats(terms.regret), "regret"],
    );
    if (state.measure === "det") rows.push([`${beta}[log π/ρ + w log π]`, "RePO_det term", nats(terms.det), "det"]);
    if (state.scale === "normalized" && response.values) {
      rows.push(["", "shaded value", `${signed(response.values[i])} × RMS`]);
    }
    return rows;
  }

  const titleOf = (response, i) => `token ${i + 1} of ${response.tokens.length}`;

  function show(span) {
    const response = span.parentElement.response;
    const i = Number(span.dataset.i);
    const title = make("p");
    const text = make("bdi", "", response.tokens[i].replaceAll("\n", "↵").replaceAll("\t", "⇥"));
    title.append(text, make("span", "note", titleOf(response, i)));
    const table = make("table");
    for (const [formula, name, value, measure] of rowsOf(response, i)) {
      const row = table.insertRow();
      if (measure === state.measure) row.className = "current";
      const head = make("th", "", name);
      head.scope = "row";
      row.append(head, make("td", "formula", formula), make("td", "number", value));
    }
    card.replaceChildren(title, table);
    card.hidden = false;
    const token = span.getClientRects()[0] || span.getBoundingClientRect();
    const below = token.bottom + card.offsetHeight + 16 < innerHeight;
    card.style.left = `${Math.max(8, Math.min(token.left, innerWidth - card.offsetWidth - 24))}px`;
    card.style.top = `${below ? token.bottom + 8 : Math.max(8, token.top - card.offsetHeight - 8)}px`;
  }

  function announce(span) {
    const response = span.parentElement.response;
    const i = Number(span.dataset.i);
    const numbers = rowsOf(response, i).map(([, name, value]) => `${name} ${value}`);
    news.textContent = `“${response.tokens[i].replaceAll("\n", "new line")}”, ${titleOf(response, i)}: ${numbers.join(", ")}`;
  }

  const hide = () => (card.hidden = true);

  /** The card follows the focused token, not one that the pointer has left by scrolling. */
  function follow() {
    const span = document.activeElement.closest(".t");
    const place = span && span.getBoundingClientRect();
    place && place.bottom > 0 && place.top < innerHeight && !card.hidden ? show(span) : hide();
  }

  // --- keyboard -----------------------------------------------------------------------------------------------------

  /** Token above or below token i on the screen; i itself on the first or last line. */
  function onNextLine(spans, i, step) {
    const from = spans[i];
    let line = null;
    let best = i;
    for (let j = i + step; spans[j]; j += step) {
      const top = spans[j].offsetTop;
      if (top === from.offsetTop) continue;
      if (line !== null && top !== line) break;
      line = top;
      const distance = Math.abs(spans[j].offsetLeft - from.offsetLeft);
      if (best === i || distance < Math.abs(spans[best].offsetLeft - from.offsetLeft)) best = j;
    }
    return best;
  }

  function move(event) {
    const span = event.target.closest(".t");
    if (event.key === "Escape") hide();
    if (!span || event.ctrlKey || event.metaKey || event.altKey) return;
    const response = span.parentElement.response;
    const i = Number(span.dataset.i);
    const last = response.spans.length - 1;
    const targets = {
      ArrowLeft: () => Math.max(0, i - 1),
      ArrowRight: () => Math.min(last, i + 1),
      ArrowUp: () => onNextLine(response.spans, i, -1),
      ArrowDown: () => onNextLine(response.spans, i, 1),
      Home: () => 0,
      End: () => last,
    };
    if (!targets[event.key]) return;
    event.preventDefault();
    response.spans[targets[event.key]()].focus();
  }

  function enter(event) {
    const span = event.target.closest(".t");
    if (!span) return;
    const response = span.parentElement.response;
    response.spans[response.place].tabIndex = -1;
    response.place = Number(span.dataset.i);
    span.tabIndex = 0;
    show(span);
    announce(span);
  }

  // --- controls -----------------------------------------------------------------------------------------------------

  function update() {
    const values = new FormData(form);
    Object.assign(state, {
      policy: Number(values.get("policy")),
      against: Number(values.get("against")),
      measure: values.get("measure"),
      scale: values.get("scale"),
    });
    root.dataset.sides = values.get("sides");
    hide();
    scale = fullShade();
    root.dataset.fullShade = scale;
    const unit = state.scale === "normalized" ? "× RMS" : "nats";
    const end = scale.toPrecision(2);
    form.querySelector(".low").textContent = `−${end}`;
    form.querySelector(".high").textContent = `+${end} ${unit}`;
    responses.forEach(shade);
  }

  const select = form.elements.pair;
  const [previous, next] = form.querySelectorAll(".pair button");

  /** Show one pair, below the controls. */
  function open(index) {
    hide();
    for (const [place, article] of [...pairs.children].entries()) article.hidden = place !== index;
    for (const box of pairs.children[index].querySelectorAll(".shaded")) fill(box.response);
    previous.disabled = index === 0;
    next.disabled = index === pairs.children.length - 1;
  }

  function goTo(index) {
    open(index);
    const top = pairs.getBoundingClientRect().top;
    if (top < 0) pairs.scrollIntoView({ behavior: "instant" });
    news.textContent = `Pair ${index + 1} of ${pairs.children.length}`;
  }

  function step({ target }) {
    select.value = Number(select.value) + Number(target.value);
    goTo(Number(select.value));
    // A disabled button would lose the focus to the page.
    if (target.disabled) (target === next ? previous : next).focus();
  }

  const pairs = document.getElementById("token-pairs");
  pairs.append(...data.pairs.map(buildPair));
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("change", ({ target }) => (target.name === "pair" ? goTo(Number(target.value)) : update()));
  for (const button of [previous, next]) button.addEventListener("click", step);
  pairs.addEventListener("mouseover", ({ target }) => {
    const span = target.closest(".t");
    span ? show(span) : hide();
  });
  pairs.addEventListener("mouseleave", hide);
  pairs.addEventListener("focusin", enter);
  pairs.addEventListener("focusout", hide);
  root.addEventListener("keydown", move);
  addEventListener("scroll", follow, { passive: true });
  update();
  if (data.pairs.length) open(Number(select.value));
  root.dataset.ready = "yes";
})();
