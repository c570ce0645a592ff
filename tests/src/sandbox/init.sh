# The first process of a sandbox: gives it folders of its own over the machine's, then reaps what is orphaned in it.
# NAME is the host name, FOLDER where all that the sandbox writes is kept. It ends only when it is killed.

busybox hostname "$NAME" 2>/dev/null || hostname "$NAME"
ip link set lo up

# /var/lib and /var/log: own folders. /etc: the machine's, with own changes on top. /run and /tmp/...: fresh.
mkdir -p "$FOLDER/lib/kubelet" "$FOLDER/lib/containerd" "$FOLDER/varlog" "$FOLDER/etc" "$FOLDER/etc.work" "$FOLDER/dev"
mount --bind "$FOLDER/lib" /var/lib
mount --bind "$FOLDER/varlog" /var/log
mount -t overlay overlay -o "lowerdir=/etc,upperdir=$FOLDER/etc,workdir=$FOLDER/etc.work" /etc
mount -t tmpfs -o mode=755 run /run
mkdir -p /run/lock /run/cdi
printf '127.0.0.1 localhost %s\n' "$NAME" > /etc/hosts
: > /etc/resolv.conf

# /dev: the few nodes that containers and kubelet need; simulated GPUs are added to it.
dev="$FOLDER/dev"
mount -t tmpfs -o mode=755 dev "$dev"
for node in 'null 1 3' 'zero 1 5' 'full 1 7' 'random 1 8' 'urandom 1 9' 'tty 5 0' 'kmsg 1 11'; do
    set -- $node
    mknod -m 666 "$dev/$1" c "$2" "$3"
done
ln -s /proc/self/fd "$dev/fd"
ln -s fd/0 "$dev/stdin"
ln -s fd/1 "$dev/stdout"
ln -s fd/2 "$dev/stderr"
ln -s pts/ptmx "$dev/ptmx"
mkdir "$dev/pts" "$dev/shm" "$dev/mqueue"
mount -t devpts -o newinstance,ptmxmode=0666,mode=620 devpts "$dev/pts"
mount -t tmpfs -o mode=1777 shm "$dev/shm"
mount -t mqueue mqueue "$dev/mqueue"
mount --move "$dev" /dev

# Kubelet sets these for the whole machine. Here it finds them set, and the machine's own stay as they are.
mkdir -p /run/sysctl
for tunable in 'vm/overcommit_memory 1' 'vm/panic_on_oom 0' 'kernel/panic 10' 'kernel/panic_on_oops 1' \
    'kernel/keys/root_maxkeys 1000000' 'kernel/keys/root_maxbytes 25000000'; do
    set -- $tunable
    copy="/run/sysctl/$(echo "$1" | tr / .)"
    echo "$2" > "$copy"
    mount --bind "$copy" "/proc/sys/$1"
done
echo 1 > /proc/sys/net/ipv4/ip_forward

# Two NUMA nodes with half of the memory each, and every other CPU: kubelet's Topology Manager aligns nothing on one.
# A kernel without NUMA has no such folder, and kubelet takes the sockets for nodes there.
system=/sys/devices/system
if [ -d "$system/node" ]; then
    mount -t tmpfs -o mode=755 numa "$system/node"
    while read -r field kilobytes rest; do
        [ "$field" != MemTotal: ] || half=$((kilobytes / 2))
    done < /proc/meminfo
    for number in 0 1; do
        numa="$system/node/node$number"
        mkdir -p "$numa/hugepages"
        echo "Node $number MemTotal: $half kB" > "$numa/meminfo"
        [ "$number" = 0 ] && echo '10 20' > "$numa/distance" || echo '20 10' > "$numa/distance"
    done
    for cpu in "$system"/cpu/cpu[0-9]*; do
        number=${cpu##*/cpu}
        ln -s "../../cpu/cpu$number" "$system/node/node$((number % 2))/cpu$number"
    done
fi

# Kubelet and containerd mount for containers to see, so mounts must be shared from here on.
mount --make-rshared /
: > "$FOLDER/run/ready"

# As first process it inherits orphans; `wait` reaps them whenever its own child, the sleep, ends.
while :; do
    sleep 2 &
    wait || :
done
