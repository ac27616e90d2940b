// A browser starts no worker for a page that was opened from disk (file://), and the search runs in
// one. There a hidden frame takes the worker's place; a web server's pages keep the real one.
if (location.protocol === "file:") {
  window.IFrameWorker = class extends EventTarget {
    constructor(address) {
      super()
      this.frame = document.createElement("iframe")
      this.frame.hidden = true
      this.frame.srcdoc = "<!doctype html><body>"
      this.loaded = new Promise((resolve, reject) => {
        this.frame.onload = () => {
          const inside = this.frame.contentWindow
          inside.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }))
          const script = inside.document.createElement("script")
          script.src = address
          script.onload = () => resolve(inside)
          script.onerror = reject
          inside.document.body.append(script)
        }
      })
      document.body.append(this.frame)
    }

    postMessage(data) {
      this.loaded.then(inside => inside.dispatchEvent(new inside.MessageEvent("message", { data })))
    }

    terminate() {
      this.frame.remove()
    }
  }
  window.Worker = window.IFrameWorker
}
