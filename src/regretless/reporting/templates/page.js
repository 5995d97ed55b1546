// What overflows (a table on a phone, a long recipe) takes the focus, so that the keyboard can scroll it, and has a name.
"use strict";
(() => {
  const nameOf = (area) => area.dataset.name || area.querySelector("caption, figcaption").textContent;
  function update(area) {
    const overflows = area.scrollWidth > area.clientWidth || area.scrollHeight > area.clientHeight;
    if (!overflows) {
      for (const name of ["tabindex", "role", "aria-label"]) area.removeAttribute(name);
      return;
    }
    area.setAttribute("aria-label", nameOf(area));
    area.setAttribute("role", "group");
    area.tabIndex = 0;
  }
  const sizes = new ResizeObserver((entries) => entries.forEach(({ target }) => update(target)));
  for (const area of document.querySelectorAll(".wide, pre, figure")) sizes.observe(area);
})();
