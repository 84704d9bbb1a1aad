//! Line charts over the number of VMs, as SVG.

use std::fmt::Write;

/// A line: its name, colour, and values by the number of VMs.
pub(super) struct Line {
    pub(super) name: &'static str,
    pub(super) colour: &'static str,
    pub(super) points: Vec<(f64, f64)>,
}

/// A chart whose lines share its axes.
pub(super) struct Panel {
    pub(super) title: &'static str,
    pub(super) lines: Vec<Line>,
}

/// Dimensions in pixels.
const WIDTH: f64 = 420.0;
const HEIGHT: f64 = 300.0;
const LEFT: f64 = 56.0;
const TOP: f64 = 44.0;
const RIGHT: f64 = 12.0;
const BOTTOM: f64 = 44.0;
/// The legend's vertical position, and the width of each of its entries.
const NAMES: f64 = 33.0;
const NAME_WIDTH: f64 = 100.0;
/// Approximate number of steps of the vertical axis.
const STEPS: f64 = 5.0;

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
        let right = points().map(|(vms, _)| *vms).fold(1.0, f64::max);
        let most = points().map(|(_, value)| *value).fold(1.0, f64::max);
        let step = step(most);
        let top = (most / step).ceil() * step;
        let x = |vms: f64| LEFT + vms / right * (WIDTH - LEFT - RIGHT);
        let y = |value: f64| HEIGHT - BOTTOM - value / top * (HEIGHT - TOP - BOTTOM);
        let mut text = |x: f64, y: f64, anchor: &str, label: &str| {
            let _ = writeln!(out, "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\">{label}</text>");
        };
        text(LEFT, 16.0, "start", self.title);
        text(x(right / 2.0), HEIGHT - 10.0, "middle", "VMs");
        for vms in 0..=(right / 16.0) as u32 {
            text(x(f64::from(vms) * 16.0), HEIGHT - BOTTOM + 15.0, "middle", &(vms * 16).to_string());
        }
        let ticks = (0..=(top / step).round() as u32).map(|tick| f64::from(tick) * step);
        for tick in ticks.clone() {
            text(LEFT - 6.0, y(tick) + 4.0, "end", &tick.to_string());
        }
        for (number, line) in self.lines.iter().enumerate() {
            text(LEFT + 22.0 + NAME_WIDTH * number as f64, NAMES, "start", line.name);
        }
        for tick in ticks {
            let (from, to, at) = (x(0.0), x(right), y(tick));
            let _ = writeln!(out, "<path d=\"M{from:.1} {at:.1}H{to:.1}\" stroke=\"#ddd\"/>");
        }
        for (number, line) in self.lines.iter().enumerate() {
            let colour = line.colour;
            let (from, at) = (LEFT + NAME_WIDTH * number as f64, NAMES - 4.0);
            let _ = writeln!(out, "<path d=\"M{from:.1} {at:.1}h18\" stroke=\"{colour}\" stroke-width=\"2\"/>");
            let at = |(vms, value): &(f64, f64)| format!("{:.1},{:.1}", x(*vms), y(*value));
            let polyline = line.points.iter().map(at).collect::<Vec<_>>().join(" ");
            let _ =
                writeln!(out, "<polyline points=\"{polyline}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"2\"/>");
        }
    }
}
