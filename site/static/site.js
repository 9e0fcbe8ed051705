// The theme's menu has toggles without a name; a screen reader should hear what they open.
document.addEventListener("DOMContentLoaded", () => {
  for (const summary of document.querySelectorAll(".bd-sidebar-primary li.has-children > details > summary")) {
    const page = summary.closest("li").querySelector("a").textContent.trim();
    summary.setAttribute("aria-label", `Pages under ${page}`);
  }
});

// A table that is too wide scrolls by itself: the keyboard must reach it.
function reachWideTables() {
  for (const table of document.querySelectorAll(".bd-article table.table")) {
    if (table.scrollWidth > table.clientWidth) table.tabIndex = 0;
    else table.removeAttribute("tabindex");
  }
}
window.addEventListener("load", reachWideTables);
window.addEventListener("resize", reachWideTables);

// Search shows a piece of each page that it finds, which a page opened from a file may not fetch.
if (location.protocol === "file:") DOCUMENTATION_OPTIONS.SHOW_SEARCH_SUMMARY = false;
