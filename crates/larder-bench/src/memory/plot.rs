//! Line charts over the level, as SVG.

use std::fmt::Write;

/// A line: its name, colour, and values by the level in %.
pub(super) struct Line {
    pub(super) name: &'static str,
    pub(super) colour: &'static str,
    pub(super) points: Vec<(f64, f64)>,
}

/// A chart whose lines share its axes.
pub(super) struct Panel {
    pub(super) title: &'static str,
    pub(super) lines: Vec<Line>,
    /// True if the vertical axis has numbers; without them the lines only show a shape.
    pub(super) scale: bool,
}

/// Dimensions in pixels.
const WIDTH: f64 = 400.0;
const HEIGHT: f64 = 300.0;
const LEFT: f64 = 44.0;
const TOP: f64 = 60.0;
const RIGHT: f64 = 16.0;
const BOTTOM: f64 = 44.0;
/// The legend's vertical position, and the width of each of its entries.
const NAMES: f64 = 38.0;
const NAME_WIDTH: f64 = 110.0;
/// Approximate number of steps of the vertical axis.
const STEPS: f64 = 5.0;
/// Lowest level of the horizontal axis, and the distance of its marks.
const LEVEL: f64 = 100.0;
const LEVEL_STEP: f64 = 25.0;

/// Draws the panels side by side.
pub(super) fn svg(panels: &[Panel]) -> String {
    let width = WIDTH * panels.len() as f64;
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{HEIGHT}\" font-family=\"sans-serif\" \
         font-size=\"11\">\n<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n"
    );
    for (number, panel) in panels.iter().enumerate() {
        let _ = writeln!(out, "<g transform=\"translate({} 0)\">", WIDTH * number as f64);
        panel.draw(&mut out);
        out.push_str("</g>\n");
    }
    out.push_str("</svg>\n");
    out
}

/// Returns a round step, such that about [`STEPS`] of them reach `value_max`.
fn step(value_max: f64) -> f64 {
    let rough = value_max / STEPS;
    let power = 10f64.powf(rough.log10().floor());
    [1.0, 2.0, 5.0, 10.0].into_iter().map(|digit| digit * power).find(|step| *step >= rough).unwrap_or(rough)
}

impl Panel {
    fn draw(&self, out: &mut String) {
        let points = || self.lines.iter().flat_map(|line| &line.points);
        let right = points().map(|(level, _)| *level).fold(LEVEL + LEVEL_STEP, f64::max);
        let most = points().map(|(_, value)| *value).fold(1.0, f64::max);
        let step = step(most);
        let top = (most / step).ceil() * step;
        let x = |level: f64| LEFT + (level - LEVEL) / (right - LEVEL) * (WIDTH - LEFT - RIGHT);
        let y = |value: f64| HEIGHT - BOTTOM - value / top * (HEIGHT - TOP - BOTTOM);
        let text = |out: &mut String, x: f64, y: f64, anchor: &str, label: &str| {
            let _ = writeln!(out, "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\">{label}</text>");
        };
        text(out, LEFT, 18.0, "start", self.title);
        text(out, (x(LEVEL) + x(right)) / 2.0, HEIGHT - 10.0, "middle", "peak, % of the limit");
        let mut level = LEVEL;
        while level <= right {
            text(out, x(level), HEIGHT - BOTTOM + 15.0, "middle", &level.to_string());
            level += LEVEL_STEP;
        }
        for tick in (0..=(top / step).round() as u32).map(|tick| f64::from(tick) * step) {
            if self.scale {
                text(out, LEFT - 6.0, y(tick) + 4.0, "end", &tick.to_string());
            }
            let (from, to, at) = (x(LEVEL), x(right), y(tick));
            let _ = writeln!(out, "<path d=\"M{from:.1} {at:.1}H{to:.1}\" stroke=\"#ddd\"/>");
        }
        for (number, line) in self.lines.iter().enumerate() {
            let colour = line.colour;
            let (from, at) = (LEFT + NAME_WIDTH * number as f64, NAMES - 4.0);
            let _ = writeln!(out, "<path d=\"M{from:.1} {at:.1}h18\" stroke=\"{colour}\" stroke-width=\"2\"/>");
            text(out, from + 22.0, NAMES, "start", line.name);
            let at = |(level, value): &(f64, f64)| format!("{:.1},{:.1}", x(*level), y(*value));
            let polyline = line.points.iter().map(at).collect::<Vec<_>>().join(" ");
            let _ =
                writeln!(out, "<polyline points=\"{polyline}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"2\"/>");
        }
    }
}
