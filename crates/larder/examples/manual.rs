//! Writes the man pages and the shells' completions, generated from the definition of the command line, into a
//! directory:
//!
//! ```sh
//! cargo run -p larder --example manual -- target/manual
//! ```
//!
//! The further parts of a page (examples, files, exit statuses) are in [`PAGES`].

#[allow(dead_code)]
#[path = "../src/cli/mod.rs"]
mod cli;

use std::io;
use std::path::{Path, PathBuf};

use clap::{Command, CommandFactory};
use clap_complete::Shell;
use clap_mangen::Man;
use clap_mangen::roff::{Inline, Roff, bold, roman};

const USUAL_EXIT: [(&str, &str); 3] =
    [("0", "Success."), ("1", "It works, and the answer is no."), ("2", "A wrong command line, or an error.")];

const VM_FILE: (&str, &str) = (
    "/etc/larder/vms/NAME.toml",
    "The file of the virtual machine NAME; for other users than root ~/.config/larder/vms/NAME.toml. \
     /usr/share/doc/larder/docs/vm-file.md describes it.",
);
const TOKEN: (&str, &str) = (
    "/var/lib/larder-host/host-token",
    "The token of the service larder-host; for root /var/lib/larder-root/host-token, for other users \
     ~/.local/state/larder/host-token.",
);
const CONTROL: (&str, &str) = (
    "/run/larder/NAME.sock",
    "The control socket of the virtual machine NAME; for other users than root $XDG_RUNTIME_DIR/larder/NAME.sock.",
);
const NOTES: (&str, &str) = (
    "/var/lib/larder",
    "What is to be known of caches, journals and domains after a crash; for other users than root ~/.local/state/larder.",
);

/// Parts of a page that the definition of the command line lacks.
struct Page {
    command: &'static str,
    exit: &'static [(&'static str, &'static str)],
    files: &'static [(&'static str, &'static str)],
    /// Command lines, each with an explanation.
    examples: &'static [(&'static str, &'static str)],
}

const PAGES: [Page; 16] = [
    Page {
        command: "larder",
        exit: &USUAL_EXIT,
        files: &[VM_FILE, CONTROL, NOTES],
        examples: &[
            (
                "larder run -- qemu-system-x86_64 -m 4G -drive file=vm.qcow2,if=virtio,format=qcow2",
                "Start QEMU with its disk and its memory served by Larder.",
            ),
            ("larder vm web", "Serve all disks of the virtual machine web."),
            ("larder status", "Say what all virtual machines of this host do."),
        ],
    },
    Page {
        command: "larder run",
        exit: &[
            ("2", "A wrong command line, or a disk that cannot be served; nothing was started."),
            ("128+N", "Signal N ended QEMU."),
            ("others", "QEMU's exit code. With --dry-run 1 if one of the commands would fail."),
        ],
        files: &[("/run/larder", "The sockets, in a folder of each run's own.")],
        examples: &[
            (
                "larder run -- qemu-system-x86_64 -m 4G -drive file=vm.qcow2,if=virtio,format=qcow2",
                "Serve the virtio disks of QEMU's command line.",
            ),
            (
                "larder run --memory-budget 1GiB -- qemu-system-x86_64 -m 4G",
                "Give the guest less of the host's memory than it has.",
            ),
            (
                "larder run --disk /srv/data.raw,serial=DATA1,iops=2000 -- qemu-system-x86_64 -m 4G",
                "One more disk, with a limit.",
            ),
        ],
    },
    Page {
        command: "larder vm",
        exit: &[
            (
                "0",
                "The server was told to end; or all could be served (--check); or all is as the file says (--reload).",
            ),
            ("1", "Something is left as it was until the server is started again (--reload)."),
            ("2", "A wrong command line or file, or a disk that cannot be served."),
        ],
        files: &[VM_FILE, CONTROL, NOTES],
        examples: &[
            ("larder vm web --check", "Say whether all disks could be served."),
            ("larder vm web", "Serve them until SIGTERM or SIGINT."),
            ("larder vm web --reload", "Have the server read a changed file again, as SIGHUP does."),
        ],
    },
    Page {
        command: "larder disk serve",
        exit: &USUAL_EXIT,
        files: &[NOTES],
        examples: &[
            ("larder disk serve /srv/vm.raw --format raw --socket /run/vm.sock", "Serve a raw disk to a guest."),
            (
                "larder disk serve /srv/vm.qcow2 --socket /run/vm.sock --cache /ssd/vm.cache --cache-size 20GiB",
                "With a cache on an SSD.",
            ),
            (
                "larder disk serve /srv/vm.raw --nbd nbd+unix:///vm?socket=/run/vm.nbd --read-only",
                "To tools, such as qemu-img and nbdcopy.",
            ),
        ],
    },
    Page {
        command: "larder disk info",
        exit: &USUAL_EXIT,
        files: &[],
        examples: &[("larder disk info /srv/vm.qcow2", "Its format, its backing files, what it takes.")],
    },
    Page {
        command: "larder disk check",
        exit: &[
            ("0", "Nothing is wrong, or everything was mended."),
            ("1", "Something is wrong."),
            ("2", "A wrong command line, or the image could not be checked."),
        ],
        files: &[NOTES],
        examples: &[
            ("larder disk check /srv/vm.qcow2", "Change nothing."),
            ("larder disk check --repair /srv/vm.qcow2", "Mend what is wrong, while nobody uses it."),
        ],
    },
    Page {
        command: "larder disk resize",
        exit: &USUAL_EXIT,
        files: &[],
        examples: &[("larder disk resize /srv/vm.qcow2 +10G", "10 GiB more, while nobody uses it.")],
    },
    Page {
        command: "larder disk cache",
        exit: &USUAL_EXIT,
        files: &[NOTES],
        examples: &[
            ("larder disk cache info /ssd/vm.cache", "Whose it is, and what it holds."),
            (
                "larder disk cache flush /ssd/vm.cache --control /run/larder/web.sock",
                "Write to the disk what only the cache has, while its server runs.",
            ),
        ],
    },
    Page {
        command: "larder libvirt attach",
        exit: &USUAL_EXIT,
        files: &[
            VM_FILE,
            ("/var/lib/larder-libvirt/UUID.xml", "The domain's XML as it was."),
            ("/etc/libvirt/hooks/qemu.d/larder", "libvirt's hook, which starts and stops Larder with the domain."),
        ],
        examples: &[
            ("larder libvirt attach web", "Say what would be changed."),
            (
                "larder libvirt attach web --cache-dir /ssd --cache-size 20GiB --apply",
                "Change it; each disk gets a cache.",
            ),
        ],
    },
    Page {
        command: "larder libvirt detach",
        exit: &USUAL_EXIT,
        files: &[VM_FILE],
        examples: &[("larder libvirt detach web --apply", "Give the disks back to QEMU.")],
    },
    Page {
        command: "larder host",
        exit: &USUAL_EXIT,
        files: &[CONTROL, VM_FILE, TOKEN],
        examples: &[
            (
                "larder host",
                "A dashboard on http://127.0.0.1:9178/, and /metrics for Prometheus. Both ask for the token, whose file is \
                 logged.",
            ),
            (
                "larder host --listen /run/larder-host/socket --socket-mode 0660",
                "On a unix socket, for its user and group, who need no token.",
            ),
            (
                "larder host --listen 0.0.0.0:9178 --tls-certificates /etc/larder/pki --token-file /etc/larder/token",
                "For other hosts.",
            ),
        ],
    },
    Page {
        command: "larder status",
        exit: &[
            ("0", "Success; a virtual machine that is not served is no trouble."),
            ("1", "A virtual machine gave no answer."),
            ("2", "A wrong command line, or an error."),
        ],
        files: &[CONTROL, VM_FILE],
        examples: &[
            ("larder status", "All virtual machines, a line for each disk."),
            ("larder status web", "One of them, with everything that is known."),
            ("larder status web 5 12", "What it does, every 5 seconds, 12 times."),
            ("larder status web --trace", "The last events of its disks, to find out why one hangs."),
        ],
    },
    Page {
        command: "larder top",
        exit: &USUAL_EXIT,
        files: &[CONTROL],
        examples: &[("larder top --delay 2", "Look every 2 seconds.")],
    },
    Page {
        command: "larder advise",
        exit: &[
            ("0", "Success; with --would-fit: it fits."),
            ("1", "With --would-fit: it does not fit."),
            ("2", "A wrong command line, or an error."),
            (
                "3",
                "With --would-fit: it fits only with over-commit, or virtual machines wait for memory for longer than is \
                 accepted.",
            ),
            ("4", "With --would-fit: it cannot be told."),
        ],
        files: &[CONTROL],
        examples: &[
            ("larder advise --for 5m", "Look for five minutes, and say what follows."),
            ("larder advise --would-fit 8GiB --stall 2%", "Say whether one more virtual machine of 8 GiB fits."),
        ],
    },
    Page {
        command: "larder bench policy",
        exit: &USUAL_EXIT,
        files: &[],
        examples: &[("larder bench policy vm.vscsi.zst --sizes 5,10,20", "Hit ratios of caches of three sizes.")],
    },
    Page {
        command: "larder bench codec",
        exit: &[
            ("0", "Success."),
            ("2", "A wrong command line, or an error; also if what was compressed came back other than it was."),
        ],
        files: &[],
        examples: &[
            (
                "larder bench codec",
                "What each method, and each accelerator that is there, makes of memory of five kinds.",
            ),
            (
                "larder bench codec --memory web.mem --method lz4 --method zstd --batch 64",
                "What two of them make of a guest's memory, as pmemsave or dump-guest-memory wrote it.",
            ),
        ],
    },
];

fn main() -> io::Result<()> {
    let folder = std::env::args_os().nth(1).map(PathBuf::from);
    let folder = folder.ok_or_else(|| io::Error::other("usage: manual FOLDER"))?;
    std::fs::create_dir_all(&folder)?;
    for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
        clap_complete::generate_to(shell, &mut cli::Cli::command(), "larder", &folder)?;
    }
    write_pages(&program(), &folder)
}

fn program() -> Command {
    let mut program = cli::Cli::command().disable_help_subcommand(true);
    program.build();
    program
}

/// Writes the page of a command, and those of its subcommands.
fn write_pages(command: &Command, folder: &Path) -> io::Result<()> {
    let man = Man::new(command.clone()).source(format!("Larder {}", env!("CARGO_PKG_VERSION"))).manual("Larder");
    std::fs::write(folder.join(man.get_filename()), page(command, &man)?)?;
    command.get_subcommands().try_for_each(|sub| write_pages(sub, folder))
}

fn page(command: &Command, man: &Man) -> io::Result<Vec<u8>> {
    let mut text = Vec::new();
    man.render_title(&mut text)?;
    man.render_name_section(&mut text)?;
    man.render_synopsis_section(&mut text)?;
    man.render_description_section(&mut text)?;
    man.render_options_section(&mut text)?;
    if command.has_subcommands() {
        man.render_subcommands_section(&mut text)?;
    }
    let name = command.get_bin_name().unwrap_or_default();
    let page = PAGES.iter().find(|page| page.command == name);
    let mut more = Roff::new();
    entries(&mut more, "EXIT STATUS", page.map_or(&USUAL_EXIT, |page| page.exit));
    entries(&mut more, "FILES", page.map_or(&[], |page| page.files));
    let examples = page.map_or(&[][..], |page| page.examples);
    if !examples.is_empty() {
        more.control("SH", ["EXAMPLES"]);
    }
    for (line, what) in examples {
        more.control("PP", []).text([roman(*what)]);
        more.control("PP", []).control("RS", ["4"]).control("nf", []);
        more.text([roman(*line)]).control("fi", []).control("RE", []);
    }
    more.control("SH", ["SEE ALSO"]).text(see_also(name));
    more.to_writer(&mut text)?;
    Ok(text)
}

fn entries(page: &mut Roff, title: &str, all: &[(&str, &str)]) {
    if all.is_empty() {
        return;
    }
    page.control("SH", [title]);
    for (what, text) in all {
        page.control("TP", []).text([bold(*what)]).text([roman(*text)]);
    }
}

/// Returns the references to the parent command's page, and to the guide.
fn see_also(name: &str) -> Vec<Inline> {
    let guide = roman("the guide in /usr/share/doc/larder/docs/guide");
    match name.rsplit_once(' ') {
        Some((above, _)) => vec![bold(above.replace(' ', "-")), roman("(1), "), guide],
        None => vec![guide],
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[test]
    fn examples_are_valid_command_lines() {
        for page in &PAGES {
            for (line, _) in page.examples {
                assert!(line.starts_with(page.command), "{line}");
                if let Err(error) = cli::Cli::try_parse_from(line.split(' ')) {
                    panic!("{line}: {error}");
                }
            }
        }
    }

    #[test]
    fn pages_name_existing_commands() {
        for page in &PAGES {
            let found = page
                .command
                .split(' ')
                .skip(1)
                .try_fold(program(), |command, name| command.find_subcommand(name).cloned());
            assert!(found.is_some(), "{}", page.command);
        }
    }

    #[test]
    fn every_command_has_a_page() {
        let folder = tempfile::tempdir().expect("a folder");
        write_pages(&program(), folder.path()).expect("writes them");
        for name in ["larder", "larder-vm", "larder-disk-serve", "larder-disk-cache-flush"] {
            let text = std::fs::read_to_string(folder.path().join(format!("{name}.1"))).expect(name);
            for section in ["NAME", "SYNOPSIS", "OPTIONS", "\"EXIT STATUS\"", "\"SEE ALSO\""] {
                assert!(text.contains(&format!(".SH {section}\n")), "{name}: {section}");
            }
        }
    }
}
