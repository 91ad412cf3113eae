// Before the first paint: the theme that was chosen here, if any.
"use strict";
try {
  const theme = localStorage.getItem("theme");
  if (theme) document.documentElement.dataset.theme = theme;
} catch {
  // Without storage the system's theme it is.
}
