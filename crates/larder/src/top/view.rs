//! State of the display: its rows, their order, the selected row, and the effect of keys.

use larder_vm::control::rates::Rates;
use larder_vm::control::state::DiskState;

use super::Seen;
use crate::memories::MemorySeen;

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
        let place = Self::ALL.iter().position(|order| *order == self).unwrap_or_default();
        Self::ALL[(place + 1) % Self::ALL.len()]
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
    pub(super) fn add(&mut self, rates: &Rates, disk: &DiskState) {
        self.disks += 1;
        self.reads += rates.read.per_second;
        self.writes += rates.write.per_second;
        self.read_bytes += rates.read.bytes_per_second;
        self.written_bytes += rates.write.bytes_per_second;
        let kinds = [
            &rates.read,
            &rates.write,
            &rates.flush,
            &rates.discard,
            &rates.write_zeroes,
        ];
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
    Trouble(usize),
}

#[derive(Default)]
pub(super) struct View {
    pub(super) seen: Seen,
    pub(super) page: Page,
    pub(super) order: Order,
    pub(super) helps: bool,
    /// Index of the selected row.
    pub(super) chosen: usize,
    /// Index of the first visible row.
    pub(super) top: usize,
    /// Number of visible rows at the last drawing.
    pub(super) room: usize,
}

impl View {
    /// Takes a new sample. The selected VM or disk stays selected, if it still exists.
    pub(super) fn see(&mut self, seen: Seen) {
        let chosen = self.rows().get(self.chosen).map(|row| self.name_of(row));
        self.seen = seen;
        if let Some(chosen) = chosen
            && let Some(place) = self.rows().iter().position(|row| self.name_of(row) == chosen)
        {
            self.chosen = place;
        }
    }

    /// Returns the names of a row's VM and disk.
    pub(super) fn name_of(&self, row: &Row) -> (String, String) {
        match row {
            Row::Vm(vm) => (vm.clone(), String::new()),
            Row::Disk(place) => {
                let rates = &self.seen.sample.rates[*place];
                (rates.vm.clone(), rates.disk.clone())
            }
            Row::Memory(place) => (self.seen.memories[*place].vm.clone(), String::new()),
            Row::Trouble(place) => (self.seen.troubles[*place].0.clone(), String::new()),
        }
    }

    /// Returns the total activity of a row's disks.
    pub(super) fn totals(&self, row: &Row) -> Totals {
        let mut totals = Totals::default();
        for (place, (rates, (disk, _))) in self.seen.sample.rates.iter().zip(&self.seen.sample.disks).enumerate() {
            let is_in = match row {
                Row::Vm(vm) => rates.vm == *vm,
                Row::Disk(of) => place == *of,
                Row::Memory(_) | Row::Trouble(_) => false,
            };
            if is_in {
                totals.add(&rates.rates, disk);
            }
        }
        totals
    }

    /// Returns the rows of this page, in order.
    pub(super) fn rows(&self) -> Vec<Row> {
        let rates = &self.seen.sample.rates;
        let mut rows: Vec<Row> = match &self.page {
            Page::Vms => {
                let mut vms: Vec<&str> = rates.iter().map(|rates| rates.vm.as_str()).collect();
                vms.dedup();
                for memory in &self.seen.memories {
                    if !vms.contains(&memory.vm.as_str()) {
                        vms.push(&memory.vm);
                    }
                }
                let troubles = (0..self.seen.troubles.len()).map(Row::Trouble);
                vms.into_iter()
                    .map(|vm| Row::Vm(vm.to_owned()))
                    .chain(troubles)
                    .collect()
            }
            Page::Disks(vm) => {
                let is_in = |place: &usize| vm.as_ref().is_none_or(|vm| rates[*place].vm == *vm);
                (0..rates.len()).filter(is_in).map(Row::Disk).collect()
            }
            Page::Memories => (0..self.seen.memories.len()).map(Row::Memory).collect(),
            Page::Disk(..) | Page::Memory(_) => Vec::new(),
        };
        if self.order == Order::Name {
            rows.sort_by_key(|row| self.name_of(row));
        } else {
            let weight = |row: &Row| match row {
                // Memory is sorted by the share of time lost.
                Row::Memory(place) => self.seen.memories[*place].rates.some,
                row => self.order.weight(&self.totals(row)),
            };
            rows.sort_by(|one, other| weight(other).total_cmp(&weight(one)));
        }
        rows
    }

    /// Returns the memory of the VM `vm`, if it is managed.
    pub(super) fn memory_of(&self, vm: &str) -> Option<&MemorySeen> {
        self.seen.memories.iter().find(|memory| memory.vm == vm)
    }

    /// Returns the index of the displayed disk, if it still exists.
    pub(super) fn disk(&self) -> Option<usize> {
        let Page::Disk(vm, disk) = &self.page else { return None };
        let mut all = self.seen.sample.rates.iter();
        all.position(|rates| rates.vm == *vm && rates.disk == *disk)
    }

    pub(super) fn press(&mut self, key: Key) {
        if self.helps {
            // Any key closes the help.
            self.helps = false;
            return;
        }
        let last = self.rows().len().saturating_sub(1);
        let page = self.room.max(1);
        match key {
            Key::Up => self.chosen = self.chosen.saturating_sub(1),
            Key::Down => self.chosen = (self.chosen + 1).min(last),
            Key::PageUp => self.chosen = self.chosen.saturating_sub(page),
            Key::PageDown => self.chosen = (self.chosen + page).min(last),
            Key::First => self.chosen = 0,
            Key::Last => self.chosen = last,
            Key::Sort => self.order = self.order.next(),
            Key::Help => self.helps = true,
            Key::Vms => self.go(Page::Vms),
            Key::Disks => self.go(Page::Disks(None)),
            Key::Memories => self.go(Page::Memories),
            Key::Enter | Key::Disk => self.enter(key == Key::Disk),
            Key::Back => match self.page.clone() {
                Page::Disk(vm, disk) => {
                    self.go(Page::Disks(Some(vm.clone())));
                    self.choose(&vm, &disk);
                }
                Page::Disks(Some(vm)) => {
                    self.go(Page::Vms);
                    self.choose(&vm, "");
                }
                Page::Memory(vm) => {
                    self.go(Page::Memories);
                    self.choose(&vm, "");
                }
                Page::Disks(None) | Page::Vms | Page::Memories => self.go(Page::Vms),
            },
        }
    }

    /// Opens the selected row's page; with `at_once`, a VM's row opens the page of its first disk.
    fn enter(&mut self, at_once: bool) {
        let Some(row) = self.rows().get(self.chosen).cloned() else {
            return;
        };
        let (vm, disk) = self.name_of(&row);
        match row {
            Row::Disk(_) => self.go(Page::Disk(vm, disk)),
            Row::Vm(_) if at_once => {
                let first = self.seen.sample.rates.iter().find(|rates| rates.vm == vm);
                if let Some(disk) = first.map(|rates| rates.disk.clone()) {
                    self.go(Page::Disk(vm, disk));
                }
            }
            // A VM without disks is listed because of its memory.
            Row::Vm(_) if !self.seen.sample.rates.iter().any(|rates| rates.vm == vm) => self.go(Page::Memory(vm)),
            Row::Vm(_) => self.go(Page::Disks(Some(vm))),
            Row::Memory(_) => self.go(Page::Memory(vm)),
            Row::Trouble(_) => {}
        }
    }

    fn go(&mut self, page: Page) {
        if self.page != page {
            (self.page, self.chosen, self.top) = (page, 0, 0);
        }
    }

    fn choose(&mut self, vm: &str, disk: &str) {
        let is_it = |row: &Row| self.name_of(row) == (vm.to_owned(), disk.to_owned());
        self.chosen = self.rows().iter().position(is_it).unwrap_or_default();
    }
}
