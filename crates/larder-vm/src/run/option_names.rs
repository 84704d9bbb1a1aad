//! Classification of QEMU's options by whether a value follows (QEMU 7.2 to 10, `qemu-options.hx`, and options of
//! earlier versions).

/// Options without a value.
#[rustfmt::skip]
const OPTIONS_WITHOUT_VALUE: &[&str] = &[
    "h", "help", "version", "snapshot", "usb", "nographic", "portrait", "full-screen", "win2k-hack", "no-fd-bootchk",
    "no-acpi", "no-hpet", "no-quit", "no-frame", "alt-grab", "ctrl-grab", "sdl", "curses", "singlestep", "preconfig",
    "S", "s", "enable-kvm", "no-kvm", "xen-attach", "xen-domid-restrict", "no-reboot", "no-shutdown", "daemonize",
    "old-param", "semihosting", "only-migratable", "nodefaults", "no-user-config", "async-teardown", "mem-prealloc",
    "enable-sync-profile", "enable-fips", "audio-help", "perfmap", "jitdump", "tdf", "no-kvm-pit-reinjection",
    "no-kvm-irqchip", "shim",
];

/// Options whose value may be any word, even one that begins with a dash: `-append -v`.
#[rustfmt::skip]
const OPTIONS_WITH_ANY_VALUE: &[&str] = &[
    "append", "kernel", "initrd", "dtb", "bios", "pflash", "drive", "device", "object", "machine", "M", "m", "mem-path",
    "numa", "smp", "cpu", "accel", "name", "uuid", "hda", "hdb", "hdc", "hdd", "fda", "fdb", "cdrom", "blockdev", "sd",
    "mtdblock", "fsdev", "virtfs", "netdev", "nic", "net", "chardev", "serial", "parallel", "monitor", "qmp",
    "qmp-pretty", "mon", "debugcon", "pidfile", "gdb", "d", "D", "dfilter", "seed", "L", "loadvm", "option-rom", "rtc",
    "icount", "echr", "incoming", "chroot", "runas", "run-with", "sandbox", "readconfig", "trace", "plugin", "msg",
    "dump-vmstate", "set", "global", "boot", "k", "audio", "audiodev", "add-fd", "display", "spice", "rotate", "vga",
    "vnc", "acpitable", "smbios", "tpmdev", "compat", "fw_cfg", "overcommit", "action", "watchdog", "watchdog-action",
    "iscsi", "usbdevice", "xen-domid", "semihosting-config", "prom-env", "g", "writeconfig", "balloon",
];

/// Returns whether `next`, the word after option `name`, is its value. An option in neither list is assumed to have
/// one if the next word does not look like an option itself.
pub(super) fn takes_value(name: &str, next: &str) -> bool {
    !OPTIONS_WITHOUT_VALUE.contains(&name) && (OPTIONS_WITH_ANY_VALUE.contains(&name) || !next.starts_with('-'))
}
