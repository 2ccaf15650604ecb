// The site's search runs in a Worker, which browsers do not start from a file. On pages that are opened as files a
// hidden frame takes its place: it has the scope of a worker as far as the search needs it.
if (location.protocol === "file:") {
  class FrameWorker extends EventTarget {
    constructor(url) {
      super();
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.body.append(this.frame);

      const scope = this.frame.contentWindow;
      scope.postMessage = (data) => this.receive(data);
      scope.importScripts = (...urls) => Promise.all(urls.map((each) => loadScript(scope.document, each)));
      this.ready = loadScript(scope.document, url);
    }

    // To the worker: only after its script has set its listener.
    async postMessage(data) {
      await this.ready;
      const scope = this.frame.contentWindow;
      scope.dispatchEvent(new scope.MessageEvent("message", {data}));
    }

    // From the worker.
    receive(data) {
      const event = new MessageEvent("message", {data});
      this.dispatchEvent(event);
      this.onmessage?.(event);
    }

    terminate() {
      this.frame.remove();
    }
  }

  function loadScript(page, url) {
    return new Promise((resolve, reject) => {
      const script = page.createElement("script");
      script.src = url;
      script.onload = resolve;
      script.onerror = () => reject(new Error(`${url} could not be loaded`));
      page.body.append(script);
    });
  }

  window.Worker = FrameWorker;
}
