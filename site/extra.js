// The keyboard must reach a wide table that scrolls by itself. The theme makes only code reachable.
const reached = new ResizeObserver(entries => entries.forEach(({target}) => {
  target.scrollWidth > target.clientWidth ? target.setAttribute("tabindex", "0") : target.removeAttribute("tabindex");
}));
// Code floats beside the text below it, so on a wide screen it goes before the text that introduces it.
const wide = matchMedia("(min-width: 1700px)");
const arrange = () => {
  const texts = [...document.querySelectorAll(".md-content__inner > :is(p:not(.file), ul, ol)")];
  for (const text of wide.matches ? texts : texts.reverse()) {
    const side = wide.matches ? "nextElementSibling" : "previousElementSibling", codes = [];
    for (let code = text[side]; code?.matches(".highlight, .file"); code = code[side]) codes.push(code);
    wide.matches ? text.before(...codes) : text.after(...codes.reverse());
  }
};
document$.subscribe(() => {
  document.querySelectorAll(".md-typeset__scrollwrap, .md-typeset table:not([class])").forEach(element => reached.observe(element));
  if (wide.matches) arrange();
});
wide.addEventListener("change", arrange);
