// Applies the stored theme, if any, before the first paint.
"use strict";
try {
  const theme = localStorage.getItem("theme");
  if (theme) document.documentElement.dataset.theme = theme;
} catch {
  // The system's theme applies, since there is no storage.
}
