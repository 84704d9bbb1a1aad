//! `larder top`: the VMs of this host, their disks and their memory at work, in a terminal.

mod draw;
mod draw_memory;
mod view;

use std::io::IsTerminal;
use std::process::ExitCode;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::time::Duration;

use anyhow::bail;
use larder_vm::vm::find;
use ratatui::DefaultTerminal;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEventKind, KeyModifiers};

use crate::cli::Output;
use crate::cli::watch::TopArguments;
use crate::memory_table::{self, MemorySample, MemorySampler};
use crate::migration_table;
use crate::rates::{DiskSample, DiskSampler, query_disks};
use crate::status::rates;
use view::{Key, View};

/// Interval at which keys and new samples are polled.
const KEY_POLL_INTERVAL: Duration = Duration::from_millis(50);

/// Sample of the whole host.
#[derive(Default)]
struct TopSample {
    sample: DiskSample,
    /// Memory of the VMs for which it is managed.
    memories: Vec<MemorySample>,
    /// Moves of VMs, one line each.
    moves: Vec<String>,
    /// VMs that do not answer, with the error.
    errors: Vec<(String, String)>,
}

pub(crate) fn run(arguments: TopArguments) -> anyhow::Result<ExitCode> {
    let every = Duration::from_secs_f64(arguments.delay);
    if arguments.batch {
        return rates::run(None, every, arguments.count, Output::Text);
    }
    if !std::io::stdout().is_terminal() || !std::io::stdin().is_terminal() {
        bail!("standard input or output is not a terminal; --batch prints line by line to any output");
    }
    let (sender, samples) = mpsc::channel();
    let (more, requests) = mpsc::channel();
    let thread = std::thread::Builder::new().name("larder-sampler".to_owned());
    // Sampling has its own thread, because it waits for a VM that hangs.
    thread.spawn(move || run_sampler(every, &sender, &requests))?;
    let mut terminal = ratatui::init();
    let ended = run_display(&mut terminal, &samples, &more, arguments.count);
    ratatui::restore();
    ended?;
    Ok(ExitCode::SUCCESS)
}

/// Samples the host at the interval `every`, and whenever a sample is requested, until the display ends.
fn run_sampler(every: Duration, sender: &Sender<TopSample>, wanted: &Receiver<()>) {
    let mut sampler = DiskSampler::default();
    let mut memory_sampler = MemorySampler::default();
    loop {
        let mut host = TopSample::default();
        let mut served = Vec::new();
        let vms = find::known_vms();
        for (vm, asked) in query_disks(&vms) {
            match asked {
                Ok(disks) => served.push((vm, disks)),
                Err(error) => host.errors.push((vm, error.to_string())),
            }
        }
        let mut memories = Vec::new();
        for (vm, asked) in memory_table::query_all(&vms, served.iter().flat_map(|(_, disks)| disks)) {
            match asked {
                Ok((_, state)) => memories.push((vm, state)),
                Err(error) => host.errors.push((vm, format!("its memory: {error}"))),
            }
        }
        host.moves = migration_table::format_lines(migration_table::query_all());
        host.memories = memory_sampler.sample(memories);
        host.sample = sampler.sample(served);
        if sender.send(host).is_err() {
            return;
        }
        if wanted.recv_timeout(every) == Err(RecvTimeoutError::Disconnected) {
            return;
        }
    }
}

/// Runs the display until the user quits, or until `count` samples were shown.
fn run_display(
    terminal: &mut DefaultTerminal,
    seen: &Receiver<TopSample>,
    request_sample: &Sender<()>,
    count: Option<u64>,
) -> anyhow::Result<()> {
    let mut view = View::default();
    let mut shown = 0;
    let mut is_new = true;
    loop {
        if is_new {
            terminal.draw(|frame| draw::draw(frame, &mut view))?;
        }
        is_new = false;
        while let Ok(next) = seen.try_recv() {
            if count.is_some_and(|count| shown >= count) {
                return Ok(());
            }
            shown += 1;
            view.set_sample(next);
            is_new = true;
        }
        if !event::poll(KEY_POLL_INTERVAL)? {
            continue;
        }
        is_new = true;
        let Event::Key(key) = event::read()? else { continue };
        if key.kind != KeyEventKind::Press {
            continue;
        }
        let control = key.modifiers.contains(KeyModifiers::CONTROL);
        let key = match key.code {
            KeyCode::Char('q') => return Ok(()),
            KeyCode::Char('c') if control => return Ok(()),
            KeyCode::Char(' ') => {
                // The sampler ends only with the program, so sending does not fail.
                let _ = request_sample.send(());
                continue;
            }
            KeyCode::Up | KeyCode::Char('k') => Key::Up,
            KeyCode::Down | KeyCode::Char('j') => Key::Down,
            KeyCode::PageUp => Key::PageUp,
            KeyCode::PageDown => Key::PageDown,
            KeyCode::Home | KeyCode::Char('g') => Key::First,
            KeyCode::End | KeyCode::Char('G') => Key::Last,
            KeyCode::Enter => Key::Enter,
            KeyCode::Esc | KeyCode::Backspace => Key::Back,
            KeyCode::Char('1') => Key::Vms,
            KeyCode::Char('2') => Key::Disks,
            KeyCode::Char('3') => Key::Disk,
            KeyCode::Char('4') => Key::Memories,
            KeyCode::Char('s') => Key::Sort,
            KeyCode::Char('h' | '?') | KeyCode::F(1) => Key::Help,
            _ => continue,
        };
        view.press(key);
    }
}
