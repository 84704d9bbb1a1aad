//! The file that describes a VM, `/etc/larder/vms/NAME.toml`. `docs/vm-file.md` documents it for users.
//!
//! A disk has the keys of `larder run --disk` and a few more, so that disks are described in the same way everywhere.
//! All mistakes in a file are reported at once, each with its line and column.

mod chain_file;
mod memory;
mod missing_keys;

use std::collections::HashSet;
use std::fmt;
use std::io;
use std::ops::Range;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use larder_block::event_loop::SocketAddress;
use larder_block::nbd::{ExportDescription, NbdUri, NbdUriError};
use larder_block::small_file::{self, CONFIG_BYTES_MAX};
use toml::Spanned;
use toml::de::{DeArray, DeTable, DeValue};

use crate::disk::{DiskConfig, Mobility};
use crate::disk_spec::DiskSpec;
use crate::disk_spec::keys::{self, OptionProblem, nearest};
use crate::exports::{ExportsConfig, NbdExportConfig, VhostUserSource};
use crate::image::{ChainPolicy, Format, ImageAddress, ImageOptions, PinnedBy, PinnedChain};
use crate::inherited::Inherited;
use crate::listen::{Access, SOCKET_PATH_BYTES_MAX, parse_group, parse_huge_mode, parse_user};
use crate::opener::opener_client;
use crate::read_group::is_reader;
use crate::runtime_directory::{SYSTEM_DIRECTORY, socket_directory};
use crate::vm::find::memory_control_path;

pub use chain_file::ChainFile;
pub use memory::{QemuLocation, VmMemory};
pub use missing_keys::{DiskMissingKeys, find_missing_keys, insert_lines};

/// Keys of the VM itself.
const VM_KEYS: [&str; 7] = ["uuid", "control", "control-mode", "control-owner", "control-group", "disk", "memory"];

/// Keys of a disk in addition to [`keys::names`].
const DISK_KEYS: [&str; 11] = [
    "name",
    "image",
    "data-file",
    "backing",
    "socket",
    "socket-mode",
    "socket-owner",
    "socket-group",
    "nbd",
    "nbd-insecure",
    "nbd-description",
];

/// Hint for a misplaced key of the memory section.
const MEMORY_KEY_HINT: &str = "; it is a key of the memory: write it below [memory]";

/// Configuration of a VM.
#[derive(Clone, Debug)]
pub struct VmConfig {
    /// Name of the VM.
    pub name: String,
    /// UUID of the VM, in libvirt's notation.
    pub uuid: Option<String>,
    /// Path of the control socket.
    pub control: PathBuf,
    /// Permissions of the control socket.
    pub control_access: Access,
    /// Disks; empty if Larder manages only the VM's memory.
    pub disks: Vec<VmDisk>,
    /// Memory options, if its memory is managed.
    pub memory: Option<VmMemory>,
}

/// A disk of a VM.
#[derive(Clone, Debug)]
pub struct VmDisk {
    /// Name of the disk, usually the device name in the guest.
    pub name: String,
    /// Options of the disk.
    pub spec: DiskSpec,
    /// Socket of vhost-user-blk.
    pub socket: Option<PathBuf>,
    /// Permissions of the vhost-user socket, and of an NBD server's unix socket.
    pub access: Access,
    /// Address of the NBD export.
    pub nbd: Option<NbdExportConfig>,
}

/// Reason why a VM has no valid configuration.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum ConfigError {
    #[error("{}: {source}{}", path.display(), read_hint(path, source))]
    Read { path: PathBuf, source: io::Error },
    #[error("{}", format_mistakes(mistakes))]
    Mistakes { mistakes: Vec<Mistake> },
    #[error(
        "'{name}' is not a valid name of a VM: a name consists of letters, digits, '.', '_' and '-', and does not begin with '.' or '-'; a path contains a '/', as in ./{name}"
    )]
    Name { name: String },
}

fn read_hint(path: &Path, error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::NotFound if path.starts_with(vms_directory()) => {
            "; write one, or give the path of one with a / in it"
        }
        io::ErrorKind::NotFound => "; check the path, or write one",
        _ => "",
    }
}

fn format_mistakes(mistakes: &[Mistake]) -> String {
    let lines: Vec<String> = mistakes.iter().map(Mistake::to_string).collect();
    match lines.as_slice() {
        [line] => line.clone(),
        lines => format!("{} mistakes:\n{}", lines.len(), lines.join("\n")),
    }
}

/// A mistake in a VM's file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mistake {
    /// Path of the file.
    pub path: PathBuf,
    /// Line and column, counted from 1.
    pub position: (usize, usize),
    /// Description of the mistake and of the correct form.
    pub what: String,
}

impl fmt::Display for Mistake {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (line, column) = self.position;
        write!(f, "{}:{line}:{column}: {}", self.path.display(), self.what)
    }
}

/// Returns the path of the file of the VM `name`: `/etc/larder/vms/NAME.toml`; for users other than root,
/// `larder/vms` in `$XDG_CONFIG_HOME` or `~/.config`. A name with a '/' is a path.
///
/// # Errors
/// The name is invalid.
pub fn vm_file_path(name: &Path) -> Result<PathBuf, ConfigError> {
    if name.as_os_str().as_bytes().contains(&b'/') {
        return Ok(name.to_owned());
    }
    let name = check_name(name.as_os_str().to_string_lossy().into_owned())?;
    Ok(vms_directory().join(format!("{name}.toml")))
}

/// Returns whether the host's file of the VM `name` names this image.
pub(crate) fn names_image(name: &str, image: &ImageAddress) -> bool {
    let file = Path::new(SYSTEM_VMS_DIRECTORY).join(format!("{name}.toml"));
    VmConfig::read(&file).is_ok_and(|config| config.images().contains(&image))
}

/// Returns the default control socket of the VM `name`.
pub(super) fn default_control_path(name: &str) -> PathBuf {
    default_socket_directory().join(format!("{name}.sock"))
}

/// Returns the directory of sockets whose paths a VM's file does not give. If a member of the read group reads the
/// host's files, these still describe VMs of the host, whose sockets are not in the member's own directory.
fn default_socket_directory() -> PathBuf {
    match vms_directory() == Path::new(SYSTEM_VMS_DIRECTORY) && is_reader() {
        true => PathBuf::from(SYSTEM_DIRECTORY),
        false => socket_directory(),
    }
}

/// Directory of the host's files, which belongs to root.
pub const SYSTEM_VMS_DIRECTORY: &str = "/etc/larder/vms";

/// Returns the directory of this user's files.
pub fn vms_directory() -> PathBuf {
    let variable = |name: &str| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let user_config = || variable("XDG_CONFIG_HOME").or_else(|| Some(variable("HOME")?.join(".config")));
    let config_directory = match rustix::process::geteuid().is_root() {
        true => None,
        false => user_config(),
    };
    config_directory.map_or_else(|| SYSTEM_VMS_DIRECTORY.into(), |config_directory| config_directory.join("larder/vms"))
}

/// Parses a UUID (RFC 9562, section 4), and returns it in lower case.
fn parse_uuid(text: &str) -> Result<String, String> {
    let is_valid_at = |(index, c): (usize, char)| match index {
        8 | 13 | 18 | 23 => c == '-',
        _ => c.is_ascii_hexdigit(),
    };
    match text.len() == 36 && text.chars().enumerate().all(is_valid_at) {
        true => Ok(text.to_ascii_lowercase()),
        false => Err(format!("'{text}' is not a UUID, such as 2c9d6f3e-8c54-4d6a-9c0e-5f2b6c1d7a10")),
    }
}

/// Checks a name, which becomes part of file names.
fn check_name(name: String) -> Result<String, ConfigError> {
    let is_allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-');
    match name.chars().all(is_allowed) && !name.is_empty() && !name.starts_with(['.', '-']) {
        true => Ok(name),
        false => Err(ConfigError::Name { name }),
    }
}

/// Reads the text of a VM's file.
///
/// # Errors
/// The file cannot be read, is not text, or is longer than any such file can be.
pub fn read_text(path: &Path) -> io::Result<String> {
    match opener_client() {
        Some(helper) => small_file::read_open_text(helper.vm_file()?, CONFIG_BYTES_MAX),
        None => small_file::read_text(path, CONFIG_BYTES_MAX),
    }
}

/// Returns the paths of this user's VM files, sorted by name.
pub(super) fn vm_files() -> Vec<PathBuf> {
    let entries = std::fs::read_dir(vms_directory()).into_iter().flatten().flatten();
    let paths = entries.map(|entry| entry.path());
    let mut paths: Vec<PathBuf> = paths.filter(|path| path.extension().is_some_and(|it| it == "toml")).collect();
    paths.sort();
    paths
}

impl VmConfig {
    /// Returns the images that may have a journal: those of the disks, and their backing files.
    pub(crate) fn images(&self) -> Vec<&ImageAddress> {
        let mut images = Vec::new();
        for disk in &self.disks {
            images.push(&disk.spec.image);
            if let ChainPolicy::Pinned { chain, .. } = &disk.spec.chain {
                images.extend(chain.backing.iter().map(|image| &image.image));
            }
        }
        images
    }

    /// Reads and parses a file.
    ///
    /// # Errors
    /// See [`ConfigError`].
    pub fn read(path: &Path) -> Result<Self, ConfigError> {
        let text = read_text(path).map_err(|source| ConfigError::Read { path: path.to_owned(), source })?;
        Self::parse(path, &text)
    }

    /// Parses the text of the file at `path`; the file's name is the VM's name.
    ///
    /// # Errors
    /// See [`ConfigError`].
    pub fn parse(path: &Path, text: &str) -> Result<Self, ConfigError> {
        let stem = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        let name = check_name(stem)?;
        let mut reader = ConfigParser { path, text, mistakes: Vec::new() };
        let config = match DeTable::parse(text) {
            Ok(table) => Some(reader.parse_vm(name, table.get_ref())),
            Err(error) => {
                let at = error.span().unwrap_or(0..0);
                reader.add_mistake(&at, error.message());
                None
            }
        };
        let mut mistakes = reader.mistakes;
        mistakes.sort_by_key(|mistake| mistake.position);
        match config {
            Some(config) if mistakes.is_empty() => Ok(config),
            _ => Err(ConfigError::Mistakes { mistakes }),
        }
    }
}

impl VmDisk {
    /// Returns the configuration of the disk's thread; `inherited` has the sockets that exist already.
    pub fn config(&self, inherited: &Inherited) -> DiskConfig {
        let mut config = DiskConfig::new(self.spec.image.clone());
        config.options = self.spec.image_options().unwrap_or_else(|_| ImageOptions {
            // Contradicting options have been refused before. Even so, the chain is never left open.
            chain: self.spec.chain.clone(),
            ..ImageOptions::default()
        });
        config.exports = ExportsConfig {
            vhost_user_source: self.socket.clone().map(VhostUserSource::Path),
            vhost_user: self.spec.vhost_user_options(),
            nbd: self.nbd.clone(),
            access: self.access,
            inherited: inherited.clone(),
            stored_connection: Some((self.name.clone(), self.spec.image.clone())),
            active_queues_file: None,
            domain: None,
            gate: None,
        };
        config.mobility = Mobility::Local;
        if let Some(us) = self.spec.poll_us {
            config.poll_max = std::time::Duration::from_micros(us);
        }
        config.name = Some(self.name.clone());
        config
    }
}

/// State of parsing a file.
struct ConfigParser<'a> {
    path: &'a Path,
    text: &'a str,
    mistakes: Vec<Mistake>,
}

type Value<'a> = Spanned<DeValue<'a>>;

impl ConfigParser<'_> {
    /// Returns the directory to which relative paths are relative.
    fn directory(&self) -> PathBuf {
        let path = std::path::absolute(self.path).unwrap_or_else(|_| self.path.to_owned());
        path.parent().unwrap_or(Path::new("/")).to_owned()
    }

    fn add_mistake(&mut self, at: &Range<usize>, what: impl Into<String>) {
        let before = &self.text.as_bytes()[..at.start.min(self.text.len())];
        let line = before.iter().filter(|byte| **byte == b'\n').count() + 1;
        let begin = before.iter().rposition(|byte| *byte == b'\n').map_or(0, |at| at + 1);
        let column = String::from_utf8_lossy(&before[begin..]).chars().count() + 1;
        self.mistakes.push(Mistake { path: self.path.to_owned(), position: (line, column), what: what.into() });
    }

    /// Parses a value, or records the mistake.
    fn parse_value<T>(
        &mut self,
        key: &str,
        value: &Value<'_>,
        read: impl FnOnce(&str) -> Result<T, String>,
    ) -> Option<T> {
        match value_text(value.get_ref()).and_then(|text| read(&text)) {
            Ok(read) => Some(read),
            Err(why) => {
                self.add_mistake(&value.span(), format!("{key}: {why}"));
                None
            }
        }
    }

    fn parse_vm(&mut self, name: String, table: &DeTable<'_>) -> VmConfig {
        let mut config = VmConfig {
            control: default_control_path(&name),
            name,
            uuid: None,
            control_access: Access::OWNER,
            disks: Vec::new(),
            memory: None,
        };
        let directory = self.directory();
        let mut disks = None;
        if !table.contains_key("control") {
            self.check_default_socket(&(0..0), "control", &config.control);
        }
        for (key, value) in table {
            let (at, key) = (key.span(), key.get_ref().as_ref());
            match key {
                "uuid" => config.uuid = self.parse_value(key, value, parse_uuid),
                "control" => {
                    if let Some(path) = self.parse_value(key, value, |text| parse_socket_path(&directory, text)) {
                        config.control = path;
                    }
                }
                "control-mode" | "control-owner" | "control-group" => {
                    self.parse_access(key, "control-", value, &mut config.control_access);
                }
                "disk" => disks = Some(value),
                "memory" => {
                    if let Err(why) = check_socket_len(&memory_control_path(&config.name)) {
                        self.add_mistake(&at, format!("memory: {why}; give the VM, and its file, a shorter name"));
                    }
                    config.memory = self.parse_memory(value);
                }
                _ => {
                    let of_disk = keys::names().chain(DISK_KEYS).any(|name| name == key);
                    let hint = match nearest(key, VM_KEYS.into_iter()) {
                        _ if of_disk => "; it is a key of a disk: write it below [[disk]]".to_owned(),
                        _ if memory::is_memory_key(key) => MEMORY_KEY_HINT.to_owned(),
                        near if near.is_empty() => format!("; the known keys are {}", VM_KEYS.join(", ")),
                        near => near,
                    };
                    self.add_mistake(&at, format!("unknown key '{key}'{hint}"));
                }
            }
        }
        match disks.map(|disks| (disks.span(), disks.get_ref())) {
            Some((_, DeValue::Array(all))) => config.disks = self.parse_disks(&config.name, all),
            Some((at, _)) => self.add_mistake(
                &at,
                "disk: write [[disk]], with two brackets, above the keys of each disk",
            ),
            None if memory::has_memory_section(table) => {}
            None => self.add_mistake(
                &(self.text.len()..self.text.len()),
                "there is no disk; add one: a line [[disk]], and below it image = \"/path/of/the/image\" and its format",
            ),
        }
        config
    }

    /// Checks the length of a default socket path.
    fn check_default_socket(&mut self, at: &Range<usize>, key: &str, path: &Path) {
        if let Err(why) = check_socket_len(path) {
            let what = format!("{key}: {why}; give a shorter one: {key} = \"/run/larder/web.sock\"");
            self.add_mistake(at, what);
        }
    }

    fn parse_access(&mut self, key: &str, prefix: &str, value: &Value<'_>, access: &mut Access) {
        match key.strip_prefix(prefix) {
            Some("mode") => {
                // Octal numbers in TOML have the prefix 0o: 0o660.
                let read = match value.get_ref() {
                    DeValue::Integer(number) if number.radix() == 8 => parse_huge_mode(number.as_str()),
                    value => value_text(value).and_then(|text| parse_huge_mode(&text)),
                };
                match read {
                    Ok(mode) => access.mode = Some(mode),
                    Err(why) => self.add_mistake(&value.span(), format!("{key}: {why}")),
                }
            }
            Some("owner") => access.owner = self.parse_value(key, value, parse_user).or(access.owner),
            _ => access.group = self.parse_value(key, value, parse_group).or(access.group),
        }
    }

    fn parse_disks(&mut self, vm: &str, all: &DeArray<'_>) -> Vec<VmDisk> {
        let mut disks: Vec<VmDisk> = Vec::new();
        let mut names = HashSet::new();
        for (number, value) in all.iter().enumerate() {
            let DeValue::Table(table) = value.get_ref() else {
                self.add_mistake(&value.span(), "a disk is a table: write [[disk]] above its keys");
                continue;
            };
            let Some(disk) = self.parse_disk(vm, number, &value.span(), table) else {
                continue;
            };
            if !names.insert(disk.name.clone()) {
                let what =
                    format!("disk {}: another disk has that name; give it a different one: name = \"...\"", disk.name);
                self.add_mistake(&value.span(), what);
            }
            disks.push(disk);
        }
        disks
    }

    fn parse_disk(&mut self, vm: &str, number: usize, at: &Range<usize>, table: &DeTable<'_>) -> Option<VmDisk> {
        let before = self.mistakes.len();
        let directory = self.directory();
        let image = match table.get("image") {
            Some(image) => self.parse_value("image", image, |text| parse_image(&directory, text)),
            None => {
                self.add_mistake(at, "this disk has no image; add image = \"/path/of/the/image\"");
                None
            }
        };
        // Parsing continues, so that all other mistakes are reported too.
        let image = image.unwrap_or_else(|| ImageAddress::Path(PathBuf::new()));
        let mut disk = VmDisk {
            name: default_disk_name(number),
            spec: DiskSpec::new(image),
            socket: None,
            access: Access::UMASK,
            nbd: None,
        };
        let (mut nbd, mut insecure, mut description) = (None, false, None);
        let mut chain = PinnedChain::default();
        for (key, value) in table {
            let (at, key) = (key.span(), key.get_ref().as_ref());
            match key {
                "image" => {}
                "name" => {
                    if let Some(name) = self.parse_value(key, value, |text| {
                        check_name(text.to_owned())
                            .map_err(|_| "a name consists of letters, digits, '.', '_' and '-', as in vda".to_owned())
                    }) {
                        disk.name = name;
                    }
                }
                "data-file" => chain.data_file = self.parse_value(key, value, |text| parse_image(&directory, text)),
                "backing" => chain.backing = self.parse_backing(&directory, value),
                "socket" => disk.socket = self.parse_value(key, value, |text| parse_socket_path(&directory, text)),
                "socket-mode" | "socket-owner" | "socket-group" => {
                    self.parse_access(key, "socket-", value, &mut disk.access);
                }
                "nbd" => nbd = self.parse_value(key, value, |text| parse_nbd(&directory, text)),
                "nbd-insecure" => insecure = self.parse_value(key, value, parse_boolean).unwrap_or_default(),
                "nbd-description" => {
                    description = self.parse_value(key, value, |text| {
                        text.parse::<ExportDescription>().map_err(|error| error.to_string())
                    });
                }
                // All disks share one control socket.
                "control" => self.add_mistake(
                    &at,
                    "control: the VM has one control socket for all its disks; write this above the first [[disk]]",
                ),
                _ => {
                    if let Some(text) = self.parse_value(key, value, |text| Ok(resolve_value(&directory, key, text))) {
                        self.set_key(&mut disk.spec, key, &text, &at, &value.span());
                    }
                }
            }
        }
        if disk.spec.format == Some(Format::Raw) {
            self.check_raw_chain(at, &chain);
        }
        disk.spec.chain = ChainPolicy::Pinned { chain: Arc::new(chain), by: PinnedBy::VmFile };
        if let Err(error) = disk.spec.check() {
            self.add_mistake(at, format!("disk {}: {error}", disk.name));
        }
        for (key, is_set) in [("nbd-insecure", insecure), ("nbd-description", description.is_some())] {
            if is_set && nbd.is_none() {
                self.add_mistake(at, format!("{key} has no effect without nbd; omit it"));
            }
        }
        disk.nbd = nbd.map(|uri| NbdExportConfig { uri, insecure, description: description.unwrap_or_default() });
        if !table.contains_key("socket") && !table.contains_key("nbd") {
            let socket = default_socket_directory().join(format!("{vm}-{}.sock", disk.name));
            self.check_default_socket(at, "socket", &socket);
            disk.socket = Some(socket);
        }
        (self.mistakes.len() == before).then_some(disk)
    }

    fn set_key(&mut self, spec: &mut DiskSpec, key: &str, value: &str, key_at: &Range<usize>, value_at: &Range<usize>) {
        match keys::set(spec, key, value) {
            Ok(()) => {}
            Err(OptionProblem::InvalidValue(wanted)) => {
                self.add_mistake(value_at, format!("{key} = {value}: {wanted}"))
            }
            Err(OptionProblem::UnknownKey) => {
                let hint = match nearest(key, DISK_KEYS.into_iter().chain(keys::names())) {
                    _ if VM_KEYS.contains(&key) => {
                        "; it is a key of the VM: write it above the first [[disk]]".to_owned()
                    }
                    _ if memory::is_memory_key(key) => MEMORY_KEY_HINT.to_owned(),
                    near if near.is_empty() => {
                        let disk_keys = keys::KEYS.into_iter().filter(|key| *key != "control");
                        let known: Vec<&str> = DISK_KEYS.into_iter().chain(disk_keys).collect();
                        format!("; a disk has {}, and limits such as iops-total", known.join(", "))
                    }
                    near => near,
                };
                self.add_mistake(key_at, format!("unknown key '{key}'{hint}"));
            }
        }
    }
}

fn parse_format(text: &str) -> Result<Format, String> {
    Format::from_name(text).ok_or_else(|| "give raw or qcow2".to_owned())
}

fn resolve_path(folder: &Path, text: &str) -> Result<PathBuf, String> {
    match text {
        "" => Err("give a path".to_owned()),
        text => Ok(folder.join(text)),
    }
}

fn parse_socket_path(folder: &Path, text: &str) -> Result<PathBuf, String> {
    let path = resolve_path(folder, text)?;
    check_socket_len(&path).map(|()| path)
}

fn check_socket_len(path: &Path) -> Result<(), String> {
    match path.as_os_str().len() {
        len if len > SOCKET_PATH_BYTES_MAX => {
            Err(format!("{} has {len} bytes; the path of a socket has at most {SOCKET_PATH_BYTES_MAX}", path.display()))
        }
        _ => Ok(()),
    }
}

fn parse_image(folder: &Path, text: &str) -> Result<ImageAddress, String> {
    match text.parse::<ImageAddress>().map_err(|error| error.to_string())? {
        ImageAddress::Path(path) if path.as_os_str().is_empty() => Err("give a path or an NBD URI".to_owned()),
        ImageAddress::Path(path) => Ok(ImageAddress::Path(folder.join(path))),
        address => Ok(address),
    }
}

/// Returns a value for [`keys::set`]; a relative path of a cache becomes relative to the file's directory.
fn resolve_value(folder: &Path, key: &str, text: &str) -> String {
    match text.parse() {
        Ok(ImageAddress::Path(path)) if key == "cache" && text.contains('/') => folder.join(path).display().to_string(),
        _ => text.to_owned(),
    }
}

fn parse_nbd(folder: &Path, text: &str) -> Result<NbdUri, String> {
    let mut uri: NbdUri = text.parse().map_err(|error: NbdUriError| error.to_string())?;
    if let SocketAddress::Unix(path) = &mut uri.address {
        *path = parse_socket_path(folder, &path.display().to_string())?;
    }
    Ok(uri)
}

/// Returns the default name of a disk, as guests name their disks: `vda`, `vdb`, ... `vdz`, `vdaa`.
fn default_disk_name(number: usize) -> String {
    let mut name = String::new();
    let mut remaining = number + 1;
    while remaining > 0 {
        remaining -= 1;
        name.insert(0, char::from(b'a' + (remaining % 26) as u8));
        remaining /= 26;
    }
    format!("vd{name}")
}

/// Returns a value as the text that a user would write on a command line.
fn value_text(value: &DeValue<'_>) -> Result<String, String> {
    match value {
        DeValue::String(text) => Ok(text.to_string()),
        DeValue::Boolean(true) => Ok("on".to_owned()),
        DeValue::Boolean(false) => Ok("off".to_owned()),
        DeValue::Integer(number) => {
            let digits = number.as_str().replace('_', "");
            let digits = digits.strip_prefix('+').unwrap_or(&digits);
            match number.radix() {
                10 => Ok(digits.to_owned()),
                // The prefix has been removed already.
                radix => u64::from_str_radix(digits, radix)
                    .map(|number| number.to_string())
                    .map_err(|_| "this number is too large".to_owned()),
            }
        }
        other => Err(format!(
            "give a text in quotes, a number, or true or false; this is {} {}",
            match other {
                DeValue::Array(_) => "an",
                _ => "a",
            },
            other.type_str()
        )),
    }
}

fn parse_boolean(text: &str) -> Result<bool, String> {
    crate::run::keyval::parse_bool(text).ok_or_else(|| "give true or false".to_owned())
}
