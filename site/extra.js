// A wide table scrolls by itself: then the keyboard must reach it. The theme does so for code alone.
const reached = new ResizeObserver(entries => entries.forEach(({target}) => {
  target.scrollWidth > target.clientWidth ? target.setAttribute("tabindex", "0") : target.removeAttribute("tabindex");
}));
document$.subscribe(() => document.querySelectorAll(".md-typeset__scrollwrap, .md-typeset table:not([class])")
  .forEach(element => reached.observe(element)));
