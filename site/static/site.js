// The theme's menu has toggles without a name; a screen reader should hear what they open.
document.addEventListener("DOMContentLoaded", () => {
  for (const summary of document.querySelectorAll(".bd-sidebar-primary li.has-children > details > summary")) {
    const page = summary.closest("li").querySelector("a").textContent.trim();
    summary.setAttribute("aria-label", `Pages under ${page}`);
  }
});
