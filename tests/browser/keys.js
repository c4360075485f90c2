// Queries about the keyboard focus, for test_keyboard.py. The argument selects the query.
(query) => {
  const name = (element) =>
    `${element.tagName.toLowerCase()} ${element.getAttribute("aria-label") ?? element.id ?? ""} ` +
    `"${(element.labels?.[0] ?? element).textContent.trim().replace(/\s+/g, " ").slice(0, 40)}"`;
  const radio = (element) => element.matches("input[type=radio]");

  // Elements that Tab must reach, in document order: of a group of radio buttons only the checked one.
  const stops = () =>
    [...document.querySelectorAll("a[href], button, input, select, textarea, summary, [tabindex='0']")].filter(
      (element) =>
        !element.matches(":disabled, [tabindex='-1']") &&
        element.checkVisibility({ visibilityProperty: true, contentVisibilityAuto: true }) &&
        (!radio(element) || element.checked),
    );

  // The focus is visible on the element, or on the label of a hidden control.
  const outlined = (element) =>
    [element, element.closest("label")].some((candidate) => {
      if (!candidate) return false;
      const { outlineStyle, outlineWidth, outlineColor } = getComputedStyle(candidate);
      return outlineStyle !== "none" && Number.parseFloat(outlineWidth) >= 2 && !outlineColor.endsWith(", 0)");
    });

  const uncovered = (element) => {
    const control = element.closest("label") ?? element;
    const shape = control.getClientRects()[0];
    if (!shape) return false;
    const [x, y] = [shape.x + Math.min(shape.width / 2, 20), shape.y + Math.min(shape.height / 2, 20)];
    const top = document.elementFromPoint(x, y);
    return top !== null && (control.contains(top) || top.contains(control));
  };

  if (query === "reset") {
    // Tab continues from the last focused element: move that to the start of the document.
    document.body.tabIndex = -1;
    document.body.focus();
    document.body.removeAttribute("tabindex");
  }
  if (query === "stops") return stops().map(name);
  const element = document.activeElement;
  if (element === null || element === document.body) return null;
  return {
    name: name(element),
    visible: element.matches(":focus-visible") && outlined(element),
    uncovered: uncovered(element),
  };
};
