"use strict";
const label = document.getElementById("refresh");
const box = label.querySelector("input");
label.hidden = false;
box.checked = sessionStorage.getItem("refresh") === "on";
box.addEventListener("change", () => sessionStorage.setItem("refresh", box.checked ? "on" : "off"));
setInterval(() => {
  const isTyping = document.activeElement && document.activeElement.closest("form");
  if (box.checked && !document.hidden && !isTyping) location.reload();
}, 5000);
