// A long query is a message that somebody has pasted. The search field would look for each of its words as the beginning
// of a word, so that "a" and "be" find more than the names in it. Words with a weight are looked for as they stand.
const field = document.querySelector("input.md-search__input");
if (field) {
  const typed = Object.getOwnPropertyDescriptor(HTMLInputElement.prototype, "value");
  Object.defineProperty(field, "value", {
    get() {
      const text = typed.get.call(field);
      const words = text.match(/\w{3,}/g) || [];
      return words.length < 5 ? text : [...new Set(words)].map((word) => word + "^1").join(" ");
    },
    set(text) {
      typed.set.call(field, text);
    },
  });
}
