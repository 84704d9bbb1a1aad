//! Drawing of the VMs' memory.

use larder_vm::control::memory_rates::FaultRates;
use ratatui::Frame;
use ratatui::layout::{Constraint, Rect};
use ratatui::style::{Modifier, Style};
use ratatui::text::{Line, Text};
use ratatui::widgets::{Cell, Row as TableRow, Table};

use super::draw::heading_text;
use super::view::{Page, Row, View};
use crate::disk_image::format_size;
use crate::memory;
use crate::memory_table::{MemorySample, problem_text};

const MIB: f64 = (1 << 20) as f64;

const COLUMNS: [&str; 12] =
    ["vm", "memory", "budget", "used", "comp/s", "disk/s", "c_await", "d_await", "refault/s", "wMiB/s", "%some", ""];

/// Draws a row for each VM whose memory is managed; the flag beside a row marks the selected one.
pub(super) fn table(frame: &mut Frame<'_>, view: &View, rows: &[(bool, Row)], area: Rect) {
    let lines = rows.iter().filter_map(|(is_selected, row)| {
        let Row::Memory(index) = row else { return None };
        let style = match is_selected {
            true => Style::new().add_modifier(Modifier::REVERSED),
            false => Style::new(),
        };
        Some(TableRow::new(cells(&view.host.memories[*index]).map(Cell::from)).style(style))
    });
    let mut widths = [14, 9, 9, 9, 8, 8, 9, 9, 9, 8, 6, 0].map(Constraint::Max);
    widths[11] = Constraint::Fill(1);
    let bold = Style::new().add_modifier(Modifier::BOLD);
    let header = TableRow::new(COLUMNS.map(|name| Cell::from(heading_text(name)))).style(bold);
    frame.render_widget(Table::new(lines, widths).header(header), area);
}

fn cells(sample: &MemorySample) -> [Text<'static>; 12] {
    let (state, rates) = (&sample.state, &sample.rates);
    let number = |text: String| Text::from(text).right_aligned();
    let wait = |of: &FaultRates| match of.await_seconds {
        Some(seconds) => format!("{:.0} us", seconds * 1e6),
        None => "-".to_owned(),
    };
    [
        Text::from(sample.vm.clone()),
        number(format_size(state.size)),
        number(format_size(state.budget)),
        number(format_size(state.used)),
        number(format!("{:.0}", rates.compressed.per_second)),
        number(format!("{:.0}", rates.disk.per_second)),
        number(wait(&rates.compressed)),
        number(wait(&rates.disk)),
        number(format!("{:.0}", rates.refaults)),
        number(format!("{:.1}", (rates.swap_written + rates.slow_written) / MIB)),
        number(format!("{:.1}", rates.some * 100.0)),
        Text::from(problem_text(state)),
    ]
}

/// Formats the detail page of a VM's memory.
pub(super) fn format_text(view: &View) -> Vec<Line<'static>> {
    let Page::Memory(vm) = &view.page else {
        return Vec::new();
    };
    let text = match view.find_memory(vm) {
        Some(seen) => memory::format_text(&seen.state),
        None => "This memory is not managed any more; Esc goes back.".to_owned(),
    };
    text.lines().map(|line| Line::from(line.to_owned())).collect()
}
