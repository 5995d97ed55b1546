// A response of the explorer, shaded as on the screen, as an image file.
"use strict";
const saveFigure = (() => {
  const SVG = "http://www.w3.org/2000/svg";
  const XML = "http://www.w3.org/XML/1998/namespace";
  const HEAD = 34;
  const FOOT = 48;
  const UNWRITABLE = /[\u0000-\u0008\u000b\u000c\u000e-\u001f\ufffe\uffff]/g; // characters that XML cannot hold

  const add = (parent, tag, attributes, text) => {
    const node = document.createElementNS(SVG, tag);
    for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
    if (text !== undefined) node.textContent = text.replace(UNWRITABLE, "\ufffd");
    parent.append(node);
    return node;
  };

  /** Text of a token line by line, with the position of each part on the screen. */
  function* partsOf(span) {
    const range = document.createRange();
    let part = null;
    for (const [text, place] of [...span.childNodes].flatMap((node) => placesOf(node, range))) {
      if (part && Math.abs(place.top - part.top) > 4) {
        yield part;
        part = null;
      }
      part ??= { text: "", left: place.left, right: place.right, top: place.top, bottom: place.bottom };
      part.text += text;
      part.left = Math.min(part.left, place.left);
      part.right = Math.max(part.right, place.right);
    }
    if (part) yield part;
  }

  /** Characters of a token's text, or its symbol for a line end, each with its position. */
  function placesOf(node, range) {
    if (node.nodeType !== Node.TEXT_NODE) return [["↵", node.getBoundingClientRect()]];
    let start = 0;
    return [...node.data].flatMap((character) => {
      range.setStart(node, start);
      range.setEnd(node, (start += character.length));
      const place = range.getClientRects()[0];
      return place && character !== "\n" ? [[character, place]] : [];
    });
  }

  /** Offer the response in `box` as the file `name`; `ends` are the texts at the ends of the color scale. */
  return (box, title, ends, name) => {
    const frame = box.getBoundingClientRect();
    const [width, height] = [Math.ceil(frame.width), Math.ceil(frame.height)];
    const style = getComputedStyle(document.documentElement);
    const color = (key) => style.getPropertyValue(`--${key}`).trim();
    const svg = document.createElementNS(SVG, "svg");
    svg.setAttribute("viewBox", `-8 -${HEAD} ${width + 16} ${height + HEAD + FOOT}`);
    const gradient = add(add(svg, "defs", {}), "linearGradient", { id: "ramp" });
    ["negative", "card", "positive"].forEach((key, i) => add(gradient, "stop", { offset: i / 2, "stop-color": color(key) }));
    add(svg, "rect", { x: -8, y: -HEAD, width: width + 16, height: height + HEAD + FOOT, fill: color("card") });
    const small = { "font-family": "sans-serif", "font-size": 12, fill: color("ink") };
    add(svg, "text", { ...small, x: 0, y: 14 - HEAD, "font-size": 14 }, title);
    const letters = getComputedStyle(box);
    const group = add(svg, "g", { "font-family": "monospace", "font-size": letters.fontSize, fill: color("ink") });
    for (const span of box.children) {
      const fill = getComputedStyle(span).backgroundColor;
      for (const part of partsOf(span)) {
        const [x, y] = [part.left - frame.left, part.top - frame.top];
        const size = { width: part.right - part.left, height: part.bottom - part.top };
        add(group, "rect", { x, y, ...size, fill });
        const text = add(group, "text", { x, y: y + 0.78 * size.height, textLength: size.width }, part.text);
        text.setAttributeNS(XML, "xml:space", "preserve");
      }
    }
    const scale = { x: 0, y: height + 14, width: 160, height: 10, fill: "url(#ramp)", stroke: color("line") };
    add(svg, "rect", scale);
    add(svg, "text", { ...small, x: 0, y: height + 38 }, ends[0]);
    add(svg, "text", { ...small, x: 160, y: height + 38, "text-anchor": "end" }, ends[1]);
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([new XMLSerializer().serializeToString(svg)], { type: "image/svg+xml" }));
    link.download = name;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10000);
  };
})();
