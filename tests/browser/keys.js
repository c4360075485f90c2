// Answers about the keyboard's focus, for test_keyboard.py. One function: what it is asked is its argument.
(asked) => {
  const name = (element) =>
    `${element.tagName.toLowerCase()} ${element.getAttribute("aria-label") ?? element.id ?? ""} ` +
    `"${(element.labels?.[0] ?? element).textContent.trim().replace(/\s+/g, " ").slice(0, 40)}"`;
  const radio = (element) => element.matches("input[type=radio]");

  // What Tab must come to, in the order of the document: of a group of radio buttons the one that is chosen.
  const stops = () =>
    [...document.querySelectorAll("a[href], button, input, select, textarea, summary, [tabindex='0']")].filter(
      (element) =>
        !element.matches(":disabled, [tabindex='-1']") &&
        element.checkVisibility({ visibilityProperty: true, contentVisibilityAuto: true }) &&
        (!radio(element) || element.checked),
    );

  // What shows the focus: the element, or what a label draws around its hidden control.
  const outlined = (element) =>
    [element, element.closest("label")].some((one) => {
      if (!one) return false;
      const { outlineStyle, outlineWidth, outlineColor } = getComputedStyle(one);
      return outlineStyle !== "none" && Number.parseFloat(outlineWidth) >= 2 && !outlineColor.endsWith(", 0)");
    });

  const uncovered = (element) => {
    const whole = element.closest("label") ?? element;
    const shape = whole.getClientRects()[0];
    if (!shape) return false;
    const [x, y] = [shape.x + Math.min(shape.width / 2, 20), shape.y + Math.min(shape.height / 2, 20)];
    const top = document.elementFromPoint(x, y);
    return top !== null && (whole.contains(top) || top.contains(whole));
  };

  if (asked === "begin") {
    // Tab goes on from where the focus was last: bring that to the document's start.
    document.body.tabIndex = -1;
    document.body.focus();
    document.body.removeAttribute("tabindex");
  }
  if (asked === "stops") return stops().map(name);
  const element = document.activeElement;
  if (element === null || element === document.body) return null;
  return {
    name: name(element),
    visible: element.matches(":focus-visible") && outlined(element),
    uncovered: uncovered(element),
  };
};
