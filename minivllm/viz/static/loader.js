// Loads the ES modules of a page, which arrive as text, and mounts the views that wait for them. No bundler, no server: each module
// becomes a blob URL, and its imports are pointed at the blob URLs of the others. A classic script, so that it runs anywhere; the
// Python side puts the version in. Two outputs of one notebook share what has the same version.
(() => {
  const version = "@VERSION@";
  const loaders = (globalThis.minivllmViz ??= {});

  function makeLoader() {
    const sources = {};
    const urls = {};

    function url(name, within = []) {
      if (within.includes(name)) throw new Error(`modules import each other: ${[...within, name].join(" > ")}`);
      if (!(name in sources)) throw new Error(`the page has no module ${name}.js`);
      if (!urls[name]) {
        const text = sources[name].replace(
          /(\bfrom\s*|\bimport\s*)"\.\/(\w+)\.js"/g,
          (_, head, other) => `${head}"${url(other, [...within, name])}"`,
        );
        const named = `${text}\n//# sourceURL=minivllm/viz/static/${name}.js\n`;
        urls[name] = URL.createObjectURL(new Blob([named], { type: "text/javascript" }));
      }
      return urls[name];
    }

    function add(modules, styles) {
      Object.assign(sources, modules);
      for (const [name, text] of Object.entries(styles)) {
        const id = `mv-style-${version}-${name}`;
        if (document.getElementById(id)) continue;
        document.head.append(Object.assign(document.createElement("style"), { id, textContent: text }));
      }
    }

    async function inflate(base64) {
      const bytes = Uint8Array.from(atob(base64), (c) => c.charCodeAt(0));
      const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
      return new Response(stream).text();
    }

    // Mount every view of this version that stands on the page by now and has not been mounted. What to mount is settled before
    // anything is waited for: views further down come with programs of their own.
    async function boot() {
      const fresh = (selector, mark) => {
        const found = [...document.querySelectorAll(`${selector}[data-version="${version}"]:not([data-${mark}])`)];
        for (const element of found) element.dataset[mark] = "";
        return found;
      };
      const packed = fresh("script.mv-modules", "read");
      const places = fresh(".mv", "mounted");
      for (const script of packed) {
        const { modules, styles } = JSON.parse(await inflate(script.textContent));
        add(modules, styles);
      }
      for (const place of places) {
        const { mountPage } = await load("mount");
        await mountPage(place, load);
      }
    }

    const load = (name) => import(url(name));
    return { add, load, boot };
  }

  loaders[version] ??= makeLoader();
})();
