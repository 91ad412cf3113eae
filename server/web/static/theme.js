// Applies the stored theme, if any, before the first paint.
"use strict";
try {
  const theme = localStorage.getItem("theme");
  if (theme) document.documentElement.dataset.theme = theme;
} catch {
  // Without storage, the system's theme applies.
}
