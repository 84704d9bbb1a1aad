//! Parser of the main channel: a sequence of sections.
//!
//! ```text
//! "QEVM" be32 3
//! 07 configuration                        see configuration.rs
//! 08 be16 command, be16 length            as many bytes
//!    PACKAGED (7), length 4: be32 length  as many bytes: post-copy's device state
//! 01 be32 number, u8 length, name, be32 instance, be32 version    first section of something sent in several, RAM too
//! 02 be32 number                          further section of it
//! 03 be32 number                          last section of it
//! 04                                      as 01: device state, in one section
//! 7e be32 number                          footer of each of these four
//! 00                                      end of the stream
//! 06 be32 length                          as many bytes: description of the device state, in JSON
//! ```
//!
//! Only RAM's sections are parsed. The end of the others is searched for, see `scan.rs`. When all memory has been
//! sent, device state begins, and all the rest is literal.

use super::configuration;
use super::facts::StreamPhase;
use super::partial::{UnknownFormat, be16, be32};
use super::records::{Context, Flow, Records};
use super::scan::{Scan, ScanMatch};
use super::wire::{MAIN_VERSION, RAM_VERSION, command, section};

#[derive(Clone, Copy, Debug)]
enum MainState {
    /// Version of the stream.
    Version,
    /// Beginning of a section.
    Section,
    /// This many capabilities of the configuration.
    Capabilities(u32),
    /// This many literal bytes, and the state after them.
    Skip(u64, AfterSkip),
    /// First command of a package of this many bytes.
    PackageStart(u32),
    /// Last command of a package.
    PackageEnd,
    /// RAM's records.
    Ram,
    /// Section whose end is searched for.
    Scan(Scan),
    /// Literal bytes to the end.
    Opaque,
}

#[derive(Clone, Copy, Debug)]
enum AfterSkip {
    Section,
    PackageEnd,
}

/// Bytes of a command without data.
const COMMAND_BYTES: usize = 5;

/// Upper bound of section numbers: QEMU numbers what it saves from 0 on, a few hundred in a large machine.
const NUMBER_PLAUSIBLE_MAX: u32 = 0xffff;

/// Parser of the main channel.
#[derive(Debug)]
pub(super) struct MainChannel {
    at: MainState,
    records: Records,
    /// Number of RAM's sections.
    ram: Option<u32>,
    /// Set while the records are in RAM's last section.
    last_section: bool,
    /// Search to resume if the supposed end of a section turns out to be wrong, until the next section confirms it.
    doubtful: Option<Scan>,
}

impl MainChannel {
    /// Creates a parser that starts after the magic.
    pub(super) const fn new() -> Self {
        Self { at: MainState::Version, records: Records::new(), ram: None, last_section: false, doubtful: None }
    }

    /// Creates the parser of a main channel that has reconnected in post-copy: it starts with a command, and RAM
    /// keeps its number.
    pub(super) const fn resumed(ram: Option<u32>) -> Self {
        Self { at: MainState::Section, ram, ..Self::new() }
    }

    /// Parses like [`Records::step`], but never returns [`Flow::End`].
    pub(super) fn step(&mut self, cx: &mut Context<'_>, data: &[u8], taken: &mut usize) -> Flow {
        loop {
            let known = match self.at {
                MainState::Ram => match self.records.step(cx, data, taken) {
                    Flow::End => {
                        self.at = MainState::Section;
                        if self.last_section {
                            cx.facts.ram_ended = true;
                            cx.facts.count_change();
                        }
                        Ok(true)
                    }
                    Flow::Lost => Err(UnknownFormat),
                    flow => return flow,
                },
                MainState::Scan(mut scan) => {
                    let found = scan.find(data, taken);
                    self.at = MainState::Scan(scan);
                    if let Some(found) = found {
                        self.on_match(cx, found);
                    }
                    Ok(found.is_some())
                }
                MainState::Opaque => {
                    *taken = data.len();
                    return Flow::Pause;
                }
                MainState::Skip(left, then) => Ok(self.skip(left, then, data, taken)),
                _ => self.structure(cx, data, taken),
            };
            match known {
                Ok(true) => {}
                Ok(false) => return Flow::Pause,
                Err(UnknownFormat) => self.resynchronise(cx),
            }
        }
    }

    /// Parses a structure once it is complete. Returns false while it is not.
    fn structure(&mut self, cx: &mut Context<'_>, data: &[u8], taken: &mut usize) -> Result<bool, UnknownFormat> {
        let complete = match self.at {
            MainState::Version => cx.partial.complete(data, taken, |_| Ok(4)),
            MainState::Capabilities(_) => cx.partial.complete(data, taken, configuration::capability_bytes),
            MainState::PackageStart(_) | MainState::PackageEnd => {
                cx.partial.complete(data, taken, |_| Ok(COMMAND_BYTES))
            }
            _ => cx.partial.complete(data, taken, section_bytes),
        };
        if !complete? {
            return Ok(false);
        }
        let then = match self.at {
            MainState::Version if be32(cx.partial.get(), 0) != MAIN_VERSION => Err(UnknownFormat),
            MainState::Version => Ok(MainState::Section),
            MainState::Capabilities(left) => {
                configuration::capability(cx);
                Ok(capabilities(left - 1))
            }
            MainState::PackageStart(size) => {
                cx.facts.postcopy_listen = cx.partial.get() == bare_command(command::POSTCOPY_LISTEN);
                cx.facts.count_change();
                let between = u64::from(size) - 2 * COMMAND_BYTES as u64;
                Ok(MainState::Skip(between, AfterSkip::PackageEnd))
            }
            MainState::PackageEnd => {
                cx.facts.postcopy_run = cx.partial.get() == bare_command(command::POSTCOPY_RUN);
                cx.facts.phase = StreamPhase::Postcopy;
                cx.facts.count_change();
                Ok(MainState::Section)
            }
            _ => self.section(cx),
        };
        cx.partial.clear();
        self.at = then?;
        Ok(true)
    }

    /// Parses the complete beginning of a section.
    fn section(&mut self, cx: &mut Context<'_>) -> Result<MainState, UnknownFormat> {
        let bytes = cx.partial.get();
        let ended = cx.facts.phase == StreamPhase::Ended;
        let at = match bytes[0] {
            section::DESCRIPTION => MainState::Skip(u64::from(be32(bytes, 1)), AfterSkip::Section),
            _ if ended => MainState::Opaque,
            section::CONFIGURATION => {
                configuration::machine(cx);
                MainState::Section
            }
            section::SUBSECTION => capabilities(configuration::capabilities(cx.partial)),
            section::COMMAND => self.command(cx),
            section::FOOTER => MainState::Section,
            section::EOF => {
                if !cx.facts.ram_ended {
                    return Err(UnknownFormat);
                }
                cx.facts.phase = StreamPhase::Ended;
                cx.facts.count_change();
                MainState::Section
            }
            kind @ (section::PART | section::END) => self.next_section(cx, kind)?,
            kind => self.first_section(cx, kind)?,
        };
        self.doubtful = None;
        Ok(at)
    }

    /// Parses the beginning of a section of something that has begun before.
    fn next_section(&mut self, cx: &mut Context<'_>, kind: u8) -> Result<MainState, UnknownFormat> {
        let number = be32(cx.partial.get(), 1);
        if self.ram.is_none() && cx.facts.postcopy_resumed {
            self.ram = Some(number);
        }
        if self.ram != Some(number) {
            if self.doubtful.is_some() && number > NUMBER_PLAUSIBLE_MAX {
                return Err(UnknownFormat);
            }
            return Ok(MainState::Scan(Scan::new(Some(number), self.ram)));
        }
        Ok(self.ram_section(cx, kind == section::END))
    }

    /// Parses the beginning of a section of something new.
    fn first_section(&mut self, cx: &mut Context<'_>, kind: u8) -> Result<MainState, UnknownFormat> {
        let bytes = cx.partial.get();
        let (number, name_end) = (be32(bytes, 1), bytes.len() - 8);
        let (name, version) = (&bytes[6..name_end], be32(bytes, name_end + 4));
        if !name.iter().all(|byte| matches!(byte, b' '..=b'~')) {
            return Err(UnknownFormat);
        }
        if kind == section::START && name == b"ram" && version == RAM_VERSION && self.ram.is_none() {
            self.ram = Some(number);
            cx.blocks.set_ram_section(number);
            return Ok(MainState::Ram);
        }
        if kind == section::FULL && cx.facts.ram_ended {
            cx.facts.phase = StreamPhase::DeviceState;
            cx.facts.count_change();
            return Ok(MainState::Opaque);
        }
        Ok(MainState::Scan(Scan::new(Some(number), self.ram)))
    }

    fn ram_section(&mut self, cx: &mut Context<'_>, last: bool) -> MainState {
        self.last_section = last;
        if cx.facts.phase == StreamPhase::Setup {
            cx.facts.phase = StreamPhase::Ram;
            cx.facts.count_change();
        }
        MainState::Ram
    }

    fn command(&mut self, cx: &mut Context<'_>) -> MainState {
        let bytes = cx.partial.get();
        let (number, len) = (be16(bytes, 1), be16(bytes, 3));
        let facts = &mut *cx.facts;
        match number {
            command::OPEN_RETURN_PATH => facts.return_path = true,
            command::POSTCOPY_ADVISE => {
                facts.postcopy_advised = true;
                if len == 16 {
                    facts.page_sizes = u64::from(be32(bytes, 5)) << 32 | u64::from(be32(bytes, 9));
                }
            }
            command::POSTCOPY_LISTEN => facts.postcopy_listen = true,
            command::POSTCOPY_RUN => facts.postcopy_run = true,
            command::ENABLE_COLO => facts.colo = true,
            command::POSTCOPY_RESUME => facts.postcopy_resumed = true,
            command::SWITCHOVER_START => facts.switchover_start = true,
            command::PACKAGED => {
                let size = be32(bytes, 5);
                return if size < 2 * COMMAND_BYTES as u32 {
                    MainState::Skip(u64::from(size), AfterSkip::Section)
                } else {
                    MainState::PackageStart(size)
                };
            }
            _ => {}
        }
        facts.count_change();
        MainState::Skip(u64::from(len) - (bytes.len() - COMMAND_BYTES) as u64, AfterSkip::Section)
    }

    /// Skips literal bytes; returns true once all are skipped.
    fn skip(&mut self, left: u64, then: AfterSkip, data: &[u8], taken: &mut usize) -> bool {
        let skip = left.min((data.len() - *taken) as u64);
        *taken += skip as usize;
        self.at = match then {
            _ if skip < left => MainState::Skip(left - skip, then),
            AfterSkip::Section => MainState::Section,
            AfterSkip::PackageEnd => MainState::PackageEnd,
        };
        skip == left
    }

    fn on_match(&mut self, cx: &mut Context<'_>, scan_match: ScanMatch) {
        let MainState::Scan(scan) = self.at else { return };
        self.at = match scan_match {
            ScanMatch::RamStart(number) => {
                self.ram = Some(number);
                cx.blocks.set_ram_section(number);
                self.records.reset();
                MainState::Ram
            }
            ScanMatch::RamRecords { last } => self.ram_section(cx, last),
            ScanMatch::Section(first) => {
                self.doubtful = Some(scan);
                cx.partial.set(&[first]);
                MainState::Section
            }
        }
    }

    /// Handles bytes that are not understood: searches for a structure that is recognised.
    fn resynchronise(&mut self, cx: &mut Context<'_>) {
        cx.partial.clear();
        if let Some(scan) = self.doubtful.take() {
            // The bytes found were not a footer.
            self.at = MainState::Scan(Scan::new(scan.section(), self.ram));
            return;
        }
        cx.facts.losses += 1;
        cx.facts.count_change();
        let section = match self.at {
            MainState::Ram => self.ram,
            _ => None,
        };
        self.records.reset();
        self.at = if cx.facts.ram_ended { MainState::Opaque } else { MainState::Scan(Scan::new(section, self.ram)) };
    }
}

fn capabilities(left: u32) -> MainState {
    match left {
        0 => MainState::Section,
        left => MainState::Capabilities(left),
    }
}

/// Returns the bytes of a command without data.
fn bare_command(number: u16) -> [u8; COMMAND_BYTES] {
    let [high, low] = number.to_be_bytes();
    [section::COMMAND, high, low, 0, 0]
}

/// Returns the length of a section's beginning.
fn section_bytes(partial: &[u8]) -> Result<usize, UnknownFormat> {
    match partial.first() {
        None | Some(&section::EOF) => Ok(1),
        Some(&(section::START | section::FULL)) => match partial.get(5) {
            None => Ok(6),
            Some(0) => Err(UnknownFormat),
            Some(&len) => Ok(6 + usize::from(len) + 8),
        },
        Some(&(section::PART | section::END | section::FOOTER | section::DESCRIPTION)) => Ok(5),
        Some(&section::CONFIGURATION) => configuration::machine_bytes(partial),
        Some(&section::SUBSECTION) => configuration::subsection_bytes(partial),
        Some(&section::COMMAND) => command_bytes(partial),
        Some(_) => Err(UnknownFormat),
    }
}

fn command_bytes(partial: &[u8]) -> Result<usize, UnknownFormat> {
    if partial.len() < COMMAND_BYTES {
        return Ok(COMMAND_BYTES);
    }
    match (be16(partial, 1), be16(partial, 3)) {
        (0 | command::PLAUSIBLE_MAX.., _) => Err(UnknownFormat),
        (command::PACKAGED, 4) => Ok(COMMAND_BYTES + 4),
        (command::PACKAGED, _) => Err(UnknownFormat),
        (command::POSTCOPY_ADVISE, 16) => Ok(COMMAND_BYTES + 16),
        _ => Ok(COMMAND_BYTES),
    }
}
