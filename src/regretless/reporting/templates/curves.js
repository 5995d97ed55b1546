// Curves: a focused chart is a slider over its steps that announces their values; legend boxes dim a model's lines.
"use strict";
(() => {
  for (const chart of document.querySelectorAll("svg:has(.hit)")) {
    const plot = document.createElement("div");
    chart.replaceWith(plot);
    plot.append(chart);
    plot.className = "plot";
    const steps = [...chart.querySelectorAll(".hit")];
    const values = steps.map((step) => [...step.querySelectorAll("text")].map((text) => text.textContent).join(", "));
    const move = (place) => {
      steps.forEach((step, index) => step.classList.toggle("on", index === place));
      plot.setAttribute("aria-valuenow", place + 1);
      plot.setAttribute("aria-valuetext", values[place]);
    };
    const place = () => Number(plot.getAttribute("aria-valuenow")) - 1;
    plot.tabIndex = 0;
    plot.setAttribute("role", "slider");
    plot.setAttribute("aria-label", chart.getAttribute("aria-label"));
    plot.setAttribute("aria-valuemin", 1);
    plot.setAttribute("aria-valuemax", steps.length);
    move(steps.length - 1);
    steps.at(-1).classList.remove("on");
    plot.addEventListener("focus", () => move(place()));
    plot.addEventListener("blur", () => steps[place()].classList.remove("on"));
    plot.addEventListener("keydown", (event) => {
      const last = steps.length - 1;
      const targets = { ArrowLeft: place() - 1, ArrowDown: place() - 1, ArrowRight: place() + 1, ArrowUp: place() + 1 };
      const to = { Home: 0, End: last, PageDown: place() - 10, PageUp: place() + 10, ...targets }[event.key];
      if (to === undefined) return;
      event.preventDefault();
      move(Math.max(0, Math.min(last, to)));
    });
  }
  for (const box of document.querySelectorAll("[data-shows]")) {
    box.addEventListener("change", () => {
      const lines = box.closest("section").querySelectorAll(`svg .${box.dataset.shows}`);
      lines.forEach((line) => line.classList.toggle("dimmed", !box.checked));
    });
  }
})();
