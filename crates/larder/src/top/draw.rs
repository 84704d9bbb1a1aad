//! Drawing of the view.

use std::time::Duration;

use larder_vm::control::rates::DiskRates;
use larder_vm::control::state::{CacheHealth, CacheState, DiskState, Latency, LatencyBucket, PrefetchState};
use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Modifier, Style};
use ratatui::text::{Line, Text};
use ratatui::widgets::{Cell, Clear, Paragraph, Row as TableRow, Table};

use super::draw_memory;
use super::view::{Page, Row, Totals, View};
use crate::disk_image::format_size;
use crate::memory_table::problem_text;

const MIB: f64 = (1 << 20) as f64;

/// Maximum length of the histogram's bars, in characters.
const BAR_MAX: usize = 40;

/// Maximum number of moves that are shown.
const MOVES_MAX: usize = 4;

const HELP: &str = "\
 1 VMs   2 all disks   3 the selected disk, its latencies and its caches   4 memory
 Enter   details of the selection        Esc    back
 Up, Down, PageUp, PageDown, Home, End   select
 s       sort by another column          Space  update now
 h       this help                       q      quit";

pub(super) fn draw(frame: &mut Frame<'_>, view: &mut View) {
    let moves = view.host.moves.len().min(MOVES_MAX);
    let [head, body, moves_area, foot] = Layout::vertical([
        Constraint::Length(1),
        Constraint::Fill(1),
        Constraint::Length(moves as u16),
        Constraint::Length(1),
    ])
    .areas(frame.area());
    let lines = view.host.moves.iter().take(moves).map(|line| Line::from(line.as_str()));
    frame.render_widget(Paragraph::new(lines.collect::<Vec<_>>()), moves_area);
    let bold = Style::new().add_modifier(Modifier::BOLD);
    frame.render_widget(Paragraph::new(heading(view)).style(bold), head);
    match view.disk() {
        Some(index) => frame.render_widget(Paragraph::new(disk_text(view, index)), body),
        None if matches!(view.page, Page::Memory(_)) => {
            frame.render_widget(Paragraph::new(draw_memory::format_text(view)), body);
        }
        None if matches!(view.page, Page::Disk(..)) => {
            frame.render_widget(Paragraph::new("This disk is not served any more; Esc goes back."), body);
        }
        None => table(frame, view, body),
    }
    let keys = format!(
        "1 VMs  2 disks  3 disk  4 memory  Enter more  Esc back  s sort ({})  h help  q quit",
        view.order.name()
    );
    frame.render_widget(Paragraph::new(keys).style(Style::new().add_modifier(Modifier::DIM)), foot);
    if view.shows_help {
        let height = HELP.lines().count() as u16;
        let area = Rect { height: height.min(body.height), ..body };
        frame.render_widget(Clear, area);
        let reversed = Style::new().add_modifier(Modifier::REVERSED);
        frame.render_widget(Paragraph::new(HELP).style(reversed), area);
    }
}

fn heading(view: &View) -> String {
    let sample = &view.host.sample;
    let mut all = Totals::default();
    for (of, (disk, _)) in sample.rates.iter().zip(&sample.disks) {
        all.add(&of.rates, disk);
    }
    let mut vms: Vec<&str> = sample.rates.iter().map(|rates| rates.vm.as_str()).collect();
    vms.dedup();
    let memory_only = view.host.memories.iter().map(|memory| memory.vm.as_str());
    let memory_only: Vec<&str> = memory_only.filter(|vm| !vms.contains(vm)).collect();
    vms.extend(memory_only);
    let what = match &view.page {
        Page::Vms => String::new(),
        Page::Disks(None) => "  all disks".to_owned(),
        Page::Disks(Some(vm)) => format!("  {vm}"),
        Page::Disk(vm, disk) => format!("  {vm} {disk}"),
        Page::Memories => "  memory".to_owned(),
        Page::Memory(vm) => format!("  memory of {vm}"),
    };
    let troubles = match view.host.errors.len() {
        0 => String::new(),
        count => format!(", {count} without an answer"),
    };
    format!(
        "larder top: {} VMs{troubles}, {} disks; {:.0} r/s, {:.1} MiB/s; {:.0} w/s, {:.1} MiB/s{what}",
        vms.len(),
        all.disks,
        all.reads,
        all.read_bytes / MIB,
        all.writes,
        all.written_bytes / MIB
    )
}

fn table(frame: &mut Frame<'_>, view: &mut View, area: Rect) {
    let rows = view.rows();
    if rows.is_empty() {
        let text = if view.page == Page::Memories {
            "No VM's memory is managed. `larder memory attach` does that."
        } else {
            "No VM is served. `larder vm NAME` serves one; so does `larder libvirt attach DOMAIN`, from its next start on."
        };
        frame.render_widget(Paragraph::new(text), area);
        return;
    }
    view.visible_rows = usize::from(area.height.saturating_sub(1));
    view.selected = view.selected.min(rows.len() - 1);
    view.top = view.top.min(view.selected);
    if view.selected >= view.top + view.visible_rows {
        view.top = view.selected + 1 - view.visible_rows.max(1);
    }
    if view.page == Page::Memories {
        let shown: Vec<(bool, Row)> = rows
            .into_iter()
            .enumerate()
            .skip(view.top)
            .take(view.visible_rows)
            .map(|(index, row)| (index == view.selected, row))
            .collect();
        draw_memory::table(frame, view, &shown, area);
        return;
    }
    let header = [
        "vm", "disk", "r/s", "rMiB/s", "w/s", "wMiB/s", "await", "aqu-sz", "%util", "%hit", "dirty", "memory", "%lost",
        "",
    ];
    let shown = rows.iter().enumerate().skip(view.top).take(view.visible_rows);
    let lines = shown.map(|(index, row)| {
        let style = match index == view.selected {
            true => Style::new().add_modifier(Modifier::REVERSED),
            false => Style::new(),
        };
        TableRow::new(cells(view, row).map(Cell::from)).style(style)
    });
    // The last column takes the remaining width.
    let mut widths = [14, 8, 8, 8, 8, 8, 9, 7, 6, 6, 9, 9, 6, 0].map(Constraint::Max);
    widths[13] = Constraint::Fill(1);
    let bold = Style::new().add_modifier(Modifier::BOLD);
    let header = TableRow::new(header.map(|name| Cell::from(heading_text(name)))).style(bold);
    frame.render_widget(Table::new(lines, widths).header(header), area);
}

/// Returns a column's heading, aligned like the column: text left, numbers right.
pub(super) fn heading_text(name: &'static str) -> Text<'static> {
    match name {
        "vm" | "disk" | "" => Text::from(name),
        name => Text::from(name).right_aligned(),
    }
}

fn cells(view: &View, row: &Row) -> [Text<'static>; 14] {
    let (vm, disk) = view.row_name(row);
    let totals = view.totals(row);
    if let Row::Unreachable(index) = row {
        let why = Text::from(view.host.errors[*index].1.clone());
        let mut cells: [Text<'static>; 14] = Default::default();
        cells[0] = Text::from(vm);
        cells[13] = why;
        return cells;
    }
    let number = |text: String| Text::from(text).right_aligned();
    let hits = match row {
        Row::Disk(index) => view.host.sample.rates[*index].rates.cache_hits,
        _ => None,
    };
    let memory = match row {
        Row::Vm(vm) => view.find_memory(vm),
        _ => None,
    };
    let note = match (totals.failed, totals.errors > 0.0) {
        (0, false) => memory.map_or_else(String::new, |memory| problem_text(&memory.state)),
        (0, true) => format!("{:.0} errors/s", totals.errors),
        _ => "cache has failed".to_owned(),
    };
    [
        Text::from(vm),
        match row {
            Row::Disk(_) => Text::from(disk),
            _ => Text::from(totals.disks.to_string()),
        },
        number(format!("{:.0}", totals.reads)),
        number(format!("{:.1}", totals.read_bytes / MIB)),
        number(format!("{:.0}", totals.writes)),
        number(format!("{:.1}", totals.written_bytes / MIB)),
        number(format_seconds(totals.await_seconds())),
        number(format!("{:.1}", totals.queue)),
        number(format!("{:.0}", totals.utilization * 100.0)),
        number(hits.map_or_else(|| "-".to_owned(), |hits| format!("{:.1}", hits * 100.0))),
        number(match totals.dirty {
            0 => "-".to_owned(),
            dirty => format_size(dirty),
        }),
        number(memory.map_or_else(|| "-".to_owned(), |memory| format_size(memory.state.used))),
        number(memory.map_or_else(|| "-".to_owned(), |memory| format!("{:.1}", memory.rates.some * 100.0))),
        Text::from(note),
    ]
}

fn format_seconds(seconds: f64) -> String {
    match seconds {
        none if none <= 0.0 => "-".to_owned(),
        seconds => format!("{:.1?}", Duration::from_secs_f64(seconds)),
    }
}

/// Formats the detail page of a disk: its properties, the latencies since the last update, and its caches' activity.
fn disk_text(view: &View, index: usize) -> Vec<Line<'static>> {
    let (rates, (disk, before)) = (&view.host.sample.rates[index].rates, &view.host.sample.disks[index]);
    let mut lines = vec![
        format!("image    {}, {}, {}", disk.image, disk.format.name(), format_size(disk.size)),
        format!("limits   {}", or_none(&disk.limits.to_string())),
        rates_line(rates),
        String::new(),
    ];
    let latency = |of: fn(&DiskState) -> &Latency| {
        let old = before.as_ref().map(|before| of(before).clone()).unwrap_or_default();
        of(disk).since(&old).unwrap_or_default().buckets
    };
    let reads = latency(|disk| &disk.requests.read.latency);
    let writes = latency(|disk| &disk.requests.write.latency);
    lines.extend(histograms(&reads, &writes));
    lines.push(String::new());
    if let Some(cache) = &disk.cache {
        lines.extend(cache_lines(cache));
    }
    if let Some(prefetch) = disk.prefetch.as_ref().filter(|prefetch| prefetch.memory_limit > 0) {
        lines.push(prefetch_line(prefetch));
    }
    lines.into_iter().map(Line::from).collect()
}

fn or_none(text: &str) -> &str {
    match text {
        "" => "none",
        text => text,
    }
}

fn rates_line(rates: &DiskRates) -> String {
    let share = |share: Option<f64>| share.map_or_else(|| "-".to_owned(), |share| format!("{:.1} %", share * 100.0));
    format!(
        "now      {:.0} r/s, {:.1} MiB/s; {:.0} w/s, {:.1} MiB/s; {:.0} f/s; {:.1} in flight, {:.0} % busy; cache hits {}, read ahead {}",
        rates.read.per_second,
        rates.read.bytes_per_second / MIB,
        rates.write.per_second,
        rates.write.bytes_per_second / MIB,
        rates.flush.per_second,
        rates.queue,
        rates.utilization * 100.0,
        share(rates.cache_hits),
        share(rates.prefetch_hits)
    )
}

/// Formats histograms of the latencies of reads and writes, with bounds at powers of two.
fn histograms(reads: &[LatencyBucket], writes: &[LatencyBucket]) -> Vec<String> {
    let power = |bucket: &LatencyBucket| bucket.below_ns.map_or(64, |below| below.next_power_of_two().ilog2());
    let powers = || reads.iter().chain(writes).filter(|bucket| bucket.count > 0).map(power);
    let (Some(first), Some(last)) = (powers().min(), powers().max()) else {
        return vec!["         no reads and writes were timed since the last update".to_owned()];
    };
    let of = |buckets: &[LatencyBucket], at: u32| -> u64 {
        let in_bucket = buckets.iter().filter(|bucket| power(bucket) == at);
        in_bucket.map(|bucket| bucket.count).sum()
    };
    let longest = (first..=last).map(|at| of(reads, at).max(of(writes, at))).max().unwrap_or(1);
    let bar = |count: u64| {
        let length = (count as f64 / longest as f64 * BAR_MAX as f64).ceil() as usize;
        format!("{:<BAR_MAX$}", "█".repeat(length))
    };
    let mut lines = vec![format!("{:>9}  {:<width$}  writes", "", "reads", width = BAR_MAX + 9)];
    for at in first..=last {
        let below = match at {
            64 => "more".to_owned(),
            at => format!("<{:.0?}", Duration::from_nanos(1 << at)),
        };
        let (reads, writes) = (of(reads, at), of(writes, at));
        lines.push(format!("{below:>9}  {reads:>8} {}  {writes:>8} {}", bar(reads), bar(writes)));
    }
    lines
}

fn cache_lines(cache: &CacheState) -> Vec<String> {
    let full = 100.0 * cache.occupancy as f64 / cache.capacity.max(1) as f64;
    let health = match cache.state {
        CacheHealth::Works => String::new(),
        CacheHealth::Failed => ", HAS FAILED".to_owned(),
    };
    vec![
        format!(
            "cache    {} {}, {full:.0} % full, {} dirty{health}: {}",
            cache.mode,
            format_size(cache.size),
            format_size(cache.dirty),
            cache.file
        ),
        format!(
            "         {} hits, {} in part, {} misses; {} filled, {} written to it",
            cache.hits,
            cache.partial_hits,
            cache.misses,
            format_size(cache.filled),
            format_size(cache.cache_written)
        ),
    ]
}

fn prefetch_line(prefetch: &PrefetchState) -> String {
    format!(
        "ahead    {} fetched, {} used, {} wasted; {} streams now; {} of memory",
        format_size(prefetch.fetched),
        format_size(prefetch.used),
        format_size(prefetch.wasted),
        prefetch.streams.now,
        format_size(prefetch.memory)
    )
}
