"""What the shells read: functions that ask ``greenroom completion`` at each press of Tab."""

from __future__ import annotations

_BASH = r"""# Completion of greenroom for bash; needs no package bash-completion.
_greenroom() {
    local candidate program="${1/#\~/$HOME}" line="${COMP_LINE:0:$COMP_POINT}"
    COMPREPLY=()
    while IFS= read -r candidate; do
        COMPREPLY+=("$candidate")
    done < <("$program" completion --at-cursor bash "$line" "$COMP_WORDBREAKS" 2>/dev/null)
}
complete -o nospace -F _greenroom greenroom
"""
_ZSH = r"""#compdef greenroom
# Completion of greenroom for zsh.
_greenroom() {
    local candidate about program=${(Q)words[1]}
    local -a whole whole_shown open open_shown
    program=${program/#\~/$HOME}
    while IFS=$'\t' read -r candidate about; do
        if [[ $candidate == *' ' ]]; then
            whole+=("${candidate% }")
            whole_shown+=("${candidate% }${about:+  -- $about}")
        else
            open+=("$candidate")
            open_shown+=("$candidate${about:+  -- $about}")
        fi
    done < <("$program" completion --at-cursor zsh "${(@Q)words[2,CURRENT-1]}" "${(Q)PREFIX}" 2>/dev/null)
    (( ${#open} )) && compadd -l -S '' -d open_shown -a open
    (( ${#whole} )) && compadd -l -d whole_shown -a whole
    (( ${#open} + ${#whole} ))
}
if [[ ${funcstack[1]} == _greenroom ]]; then # read from a folder of fpath
    _greenroom "$@"
else
    (( ${+functions[compdef]} )) || { autoload -Uz compinit && compinit -i; }
    compdef _greenroom greenroom
fi
"""
_FISH = r"""# Completion of greenroom for fish.
function __greenroom_at_cursor
    set -l words (commandline -opc)
    set -l current (commandline -ct | string unescape)
    set -l program (string replace -r '^~' $HOME -- $words[1])
    set -e words[1]
    $program completion --at-cursor fish $words "$current" 2>/dev/null
end
complete -c greenroom -f -a '(__greenroom_at_cursor)'
"""
SCRIPTS = {"bash": _BASH, "zsh": _ZSH, "fish": _FISH}
"""By shell, what it is to read."""
INSTALL = {
    "bash": """# put this line at the end of ~/.bashrc, and into this shell to try it:
eval "$(greenroom completion bash)"
""",
    "zsh": """# put this line at the end of ~/.zshrc, and into this shell to try it:
eval "$(greenroom completion zsh)"
""",
    "fish": """# put this line into ~/.config/fish/config.fish, and into this shell to try it:
greenroom completion fish | source
""",
}
"""By shell, how it is made to."""
