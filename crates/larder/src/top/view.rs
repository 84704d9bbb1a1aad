//! State of the display: its rows, their order, the selected row, and the effect of keys.

use larder_vm::control::rates::DiskRates;
use larder_vm::control::state::DiskState;

use super::TopSample;
use crate::memory_table::MemorySample;

/// Meaning of a pressed key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Key {
    Up,
    Down,
    PageUp,
    PageDown,
    First,
    Last,
    Enter,
    Back,
    Vms,
    Disks,
    Disk,
    Memories,
    Sort,
    Help,
}

/// Page that is displayed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) enum Page {
    /// All VMs.
    #[default]
    Vms,
    /// The disks of one VM, or of all.
    Disks(Option<String>),
    /// One disk: its VM, and its name there.
    Disk(String, String),
    /// The memory of all VMs.
    Memories,
    /// The memory of one VM.
    Memory(String),
}

/// Sort key of the rows: names in ascending order, values in descending order.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Order {
    #[default]
    Name,
    Requests,
    Bytes,
    Await,
    Utilization,
}

impl Order {
    const ALL: [Self; 5] = [Self::Name, Self::Requests, Self::Bytes, Self::Await, Self::Utilization];

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Name => "name",
            Self::Requests => "requests",
            Self::Bytes => "bytes",
            Self::Await => "await",
            Self::Utilization => "%util",
        }
    }

    fn next(self) -> Self {
        let index = Self::ALL.iter().position(|order| *order == self).unwrap_or_default();
        Self::ALL[(index + 1) % Self::ALL.len()]
    }

    /// Returns the value to sort by; larger values come first.
    fn weight(self, of: &Totals) -> f64 {
        match self {
            Self::Name => 0.0,
            Self::Requests => of.reads + of.writes,
            Self::Bytes => of.read_bytes + of.written_bytes,
            Self::Await => of.await_seconds(),
            Self::Utilization => of.utilization,
        }
    }
}

/// Total activity of several disks per second.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Totals {
    pub(super) disks: usize,
    pub(super) reads: f64,
    pub(super) writes: f64,
    pub(super) read_bytes: f64,
    pub(super) written_bytes: f64,
    pub(super) errors: f64,
    /// Average number of requests in flight.
    pub(super) queue: f64,
    /// Utilization of the busiest disk, from 0 to 1.
    pub(super) utilization: f64,
    /// Bytes of dirty data, which only caches have.
    pub(super) dirty: u64,
    /// Number of failed caches.
    pub(super) failed: usize,
}

impl Totals {
    pub(super) fn add(&mut self, rates: &DiskRates, disk: &DiskState) {
        self.disks += 1;
        self.reads += rates.read.per_second;
        self.writes += rates.write.per_second;
        self.read_bytes += rates.read.bytes_per_second;
        self.written_bytes += rates.write.bytes_per_second;
        let kinds = [&rates.read, &rates.write, &rates.flush, &rates.discard, &rates.write_zeroes];
        self.errors += kinds.iter().map(|kind| kind.errors_per_second).sum::<f64>();
        self.queue += rates.queue;
        self.utilization = self.utilization.max(rates.utilization);
        if let Some(cache) = &disk.cache {
            self.dirty += cache.dirty;
            self.failed += usize::from(cache.state == larder_vm::control::state::CacheHealth::Failed);
        }
    }

    /// Returns the average time of a request in seconds, by Little's law.
    pub(super) fn await_seconds(&self) -> f64 {
        match self.reads + self.writes {
            none if none <= 0.0 => 0.0,
            all => self.queue / all,
        }
    }
}

/// A row of a table. The number is an index into the sample's disks, memories or troubles.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Row {
    Vm(String),
    Disk(usize),
    /// The memory of a VM.
    Memory(usize),
    /// A VM that does not answer.
    Unreachable(usize),
}

#[derive(Default)]
pub(super) struct View {
    pub(super) host: TopSample,
    pub(super) page: Page,
    pub(super) order: Order,
    pub(super) shows_help: bool,
    /// Index of the selected row.
    pub(super) selected: usize,
    /// Index of the first visible row.
    pub(super) top: usize,
    /// Number of visible rows at the last drawing.
    pub(super) visible_rows: usize,
}

impl View {
    /// Takes a new sample. The selected VM or disk stays selected, if it still exists.
    pub(super) fn set_sample(&mut self, seen: TopSample) {
        let chosen = self.rows().get(self.selected).map(|row| self.row_name(row));
        self.host = seen;
        if let Some(chosen) = chosen
            && let Some(index) = self.rows().iter().position(|row| self.row_name(row) == chosen)
        {
            self.selected = index;
        }
    }

    /// Returns the names of a row's VM and disk.
    pub(super) fn row_name(&self, row: &Row) -> (String, String) {
        match row {
            Row::Vm(vm) => (vm.clone(), String::new()),
            Row::Disk(index) => {
                let rates = &self.host.sample.rates[*index];
                (rates.vm.clone(), rates.disk.clone())
            }
            Row::Memory(index) => (self.host.memories[*index].vm.clone(), String::new()),
            Row::Unreachable(index) => (self.host.errors[*index].0.clone(), String::new()),
        }
    }

    /// Returns the total activity of a row's disks.
    pub(super) fn totals(&self, row: &Row) -> Totals {
        let mut totals = Totals::default();
        for (index, (rates, (disk, _))) in self.host.sample.rates.iter().zip(&self.host.sample.disks).enumerate() {
            let is_in = match row {
                Row::Vm(vm) => rates.vm == *vm,
                Row::Disk(of) => index == *of,
                Row::Memory(_) | Row::Unreachable(_) => false,
            };
            if is_in {
                totals.add(&rates.rates, disk);
            }
        }
        totals
    }

    /// Returns the rows of this page, in order.
    pub(super) fn rows(&self) -> Vec<Row> {
        let rates = &self.host.sample.rates;
        let mut rows: Vec<Row> = match &self.page {
            Page::Vms => {
                let mut vms: Vec<&str> = rates.iter().map(|rates| rates.vm.as_str()).collect();
                vms.dedup();
                for memory in &self.host.memories {
                    if !vms.contains(&memory.vm.as_str()) {
                        vms.push(&memory.vm);
                    }
                }
                let troubles = (0..self.host.errors.len()).map(Row::Unreachable);
                vms.into_iter().map(|vm| Row::Vm(vm.to_owned())).chain(troubles).collect()
            }
            Page::Disks(vm) => {
                let is_in = |index: &usize| vm.as_ref().is_none_or(|vm| rates[*index].vm == *vm);
                (0..rates.len()).filter(is_in).map(Row::Disk).collect()
            }
            Page::Memories => (0..self.host.memories.len()).map(Row::Memory).collect(),
            Page::Disk(..) | Page::Memory(_) => Vec::new(),
        };
        if self.order == Order::Name {
            rows.sort_by_key(|row| self.row_name(row));
        } else {
            let weight = |row: &Row| match row {
                // Memory is sorted by the share of time lost.
                Row::Memory(index) => self.host.memories[*index].rates.some,
                row => self.order.weight(&self.totals(row)),
            };
            rows.sort_by(|one, other| weight(other).total_cmp(&weight(one)));
        }
        rows
    }

    /// Returns the memory of the VM `vm`, if it is managed.
    pub(super) fn find_memory(&self, vm: &str) -> Option<&MemorySample> {
        self.host.memories.iter().find(|memory| memory.vm == vm)
    }

    /// Returns the index of the displayed disk, if it still exists.
    pub(super) fn disk(&self) -> Option<usize> {
        let Page::Disk(vm, disk) = &self.page else { return None };
        let mut all = self.host.sample.rates.iter();
        all.position(|rates| rates.vm == *vm && rates.disk == *disk)
    }

    pub(super) fn press(&mut self, key: Key) {
        if self.shows_help {
            // Any key closes the help.
            self.shows_help = false;
            return;
        }
        let last = self.rows().len().saturating_sub(1);
        let page = self.visible_rows.max(1);
        match key {
            Key::Up => self.selected = self.selected.saturating_sub(1),
            Key::Down => self.selected = (self.selected + 1).min(last),
            Key::PageUp => self.selected = self.selected.saturating_sub(page),
            Key::PageDown => self.selected = (self.selected + page).min(last),
            Key::First => self.selected = 0,
            Key::Last => self.selected = last,
            Key::Sort => self.order = self.order.next(),
            Key::Help => self.shows_help = true,
            Key::Vms => self.open_page(Page::Vms),
            Key::Disks => self.open_page(Page::Disks(None)),
            Key::Memories => self.open_page(Page::Memories),
            Key::Enter | Key::Disk => self.enter(key == Key::Disk),
            Key::Back => match self.page.clone() {
                Page::Disk(vm, disk) => {
                    self.open_page(Page::Disks(Some(vm.clone())));
                    self.select(&vm, &disk);
                }
                Page::Disks(Some(vm)) => {
                    self.open_page(Page::Vms);
                    self.select(&vm, "");
                }
                Page::Memory(vm) => {
                    self.open_page(Page::Memories);
                    self.select(&vm, "");
                }
                Page::Disks(None) | Page::Vms | Page::Memories => self.open_page(Page::Vms),
            },
        }
    }

    /// Opens the selected row's page; with `at_once`, a VM's row opens the page of its first disk.
    fn enter(&mut self, at_once: bool) {
        let Some(row) = self.rows().get(self.selected).cloned() else {
            return;
        };
        let (vm, disk) = self.row_name(&row);
        match row {
            Row::Disk(_) => self.open_page(Page::Disk(vm, disk)),
            Row::Vm(_) if at_once => {
                let first = self.host.sample.rates.iter().find(|rates| rates.vm == vm);
                if let Some(disk) = first.map(|rates| rates.disk.clone()) {
                    self.open_page(Page::Disk(vm, disk));
                }
            }
            // A VM without disks is listed because of its memory.
            Row::Vm(_) if !self.host.sample.rates.iter().any(|rates| rates.vm == vm) => {
                self.open_page(Page::Memory(vm))
            }
            Row::Vm(_) => self.open_page(Page::Disks(Some(vm))),
            Row::Memory(_) => self.open_page(Page::Memory(vm)),
            Row::Unreachable(_) => {}
        }
    }

    fn open_page(&mut self, page: Page) {
        if self.page != page {
            (self.page, self.selected, self.top) = (page, 0, 0);
        }
    }

    fn select(&mut self, vm: &str, disk: &str) {
        let is_wanted = |row: &Row| self.row_name(row) == (vm.to_owned(), disk.to_owned());
        self.selected = self.rows().iter().position(is_wanted).unwrap_or_default();
    }
}
