//! Files of the dashboard, compiled into the program.

/// Static file with its content type.
pub(crate) struct Asset {
    pub(crate) content_type: &'static str,
    pub(crate) bytes: &'static [u8],
}

const HTML: &str = "text/html; charset=utf-8";
const CSS: &str = "text/css; charset=utf-8";
const SCRIPT: &str = "text/javascript; charset=utf-8";
const SVG: &str = "image/svg+xml";

macro_rules! asset {
    ($content_type:expr, $file:literal) => {
        Asset { content_type: $content_type, bytes: include_bytes!(concat!("../web/", $file)) }
    };
}

pub(crate) const INDEX: Asset = asset!(HTML, "index.html");
pub(crate) const LOGIN: Asset = asset!(HTML, "login.html");

/// Returns the other files of the pages. They contain nothing secret and need no token.
pub(crate) fn asset(path: &str) -> Option<Asset> {
    Some(match path {
        "/assets/style.css" => asset!(CSS, "style.css"),
        "/assets/icon.svg" => asset!(SVG, "icon.svg"),
        "/assets/theme.js" => asset!(SCRIPT, "theme.js"),
        "/assets/main.js" => asset!(SCRIPT, "main.js"),
        "/assets/dom.js" => asset!(SCRIPT, "dom.js"),
        "/assets/fleet.js" => asset!(SCRIPT, "fleet.js"),
        "/assets/vm.js" => asset!(SCRIPT, "vm.js"),
        "/assets/memory.js" => asset!(SCRIPT, "memory.js"),
        "/assets/migration.js" => asset!(SCRIPT, "migration.js"),
        "/assets/parts.js" => asset!(SCRIPT, "parts.js"),
        "/assets/plot.js" => asset!(SCRIPT, "plot.js"),
        "/assets/units.js" => asset!(SCRIPT, "units.js"),
        "/assets/vendor/uPlot.esm.js" => asset!(SCRIPT, "vendor/uPlot.esm.js"),
        "/assets/vendor/uPlot.min.css" => asset!(CSS, "vendor/uPlot.min.css"),
        "/assets/vendor/uPlot.LICENSE" => asset!("text/plain; charset=utf-8", "vendor/uPlot.LICENSE"),
        _ => return None,
    })
}
