// The anywidget module: history per model, drawing per view.

import { Store } from "./store.js";
import { mount } from "./view.js";

export default () => {
  let store;
  return {
    initialize({ model }) {
      store = new Store(model);
      return () => store.close();
    },
    render({ el }) {
      return mount(el, store);
    },
  };
};
